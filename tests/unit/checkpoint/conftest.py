"""What tests of remote checkpoints share: a run to upload, and an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.runs.stored_runs import write_run

if TYPE_CHECKING:
    from tests.support.servers.object_store import ObjectStore


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints. No test changes it."""
    root = tmp_path_factory.mktemp("remote") / "run"
    write_run(root)
    return root


@pytest.fixture
def s3() -> Iterator[ObjectStore]:
    # Its import takes a second, which most tests here do not need.
    from tests.support.servers.object_store import object_store

    with object_store() as store:
        yield store
