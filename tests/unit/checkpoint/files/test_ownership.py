"""Temporary files and directories say who made them, so that only those of ended processes are removed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from automodel_ckpt.base import durable_io
from automodel_ckpt.base.durable_io import is_abandoned, owned, owner_digits

MAKE = """
import os, sys
from pathlib import Path
from automodel_ckpt.base.durable_io import owner_digits
path = Path(sys.argv[1]) / f".made-{owner_digits(Path(sys.argv[1]))}"
path.mkdir()
print(path)
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A directory that a process made, which has ended."""
    made = subprocess.run(
        [sys.executable, "-c", MAKE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    return Path(made.stdout.strip())


def renamed(path: Path, start: int, digits: str) -> Path:
    """The same leftover, made by another process: with other *digits* from *start* in its name."""
    name = (
        path.name[:-32] + path.name[-32:][:start] + digits + path.name[-32:][start + len(digits) :]
    )
    return path.rename(path.with_name(name))


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_an_ended_process_of_this_node_made_is_abandoned(left: Path) -> None:
    assert is_abandoned(left)


def test_what_this_process_uses_is_not_abandoned(tmp_path: Path) -> None:
    mine = tmp_path / f".made-{owner_digits(tmp_path)}"
    mine.mkdir()
    assert not is_abandoned(mine)  # it is made, and not locked yet
    with owned(mine):
        age(mine, 1e6)
        assert not is_abandoned(mine)
    assert is_abandoned(mine)


def test_in_another_container_a_shared_lock_decides(left: Path) -> None:
    left = renamed(left, 8, "0123f567")
    assert not is_abandoned(left)  # just made
    age(left, 10)
    assert is_abandoned(left)
    with owned(left):
        assert not is_abandoned(left)


def test_on_another_node_or_mount_only_a_day_without_a_change_counts(left: Path) -> None:
    left = renamed(left, 0, "012345670123f567")
    age(left, 3600)
    assert not is_abandoned(left)
    (left / "file").write_text("being written")
    age(left, 2 * durable_io.ABANDONED_SECONDS)
    assert not is_abandoned(left)
    age(left / "file", 2 * durable_io.ABANDONED_SECONDS)
    age(left, 2 * durable_io.ABANDONED_SECONDS)
    assert is_abandoned(left)
