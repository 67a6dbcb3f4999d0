"""The Hugging Face Hub as users of the commands see it: real processes, and a local server with the Hub's HTTP API."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer, hub_server

GATED = """
model: {from_pretrained: org/gated}
tokenizer: null
dataset: {_target_: automodel_ckpt.data.mock.random_tokens}
step_scheduler: {max_steps: 1}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


def run(
    words: list[str], directory: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command of this package as a user would."""
    program = Path(sys.executable).with_name(words[0])
    return subprocess.run(
        [str(program), *words[1:]],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_gated_model_ends_the_run_after_one_request(server: HubServer, tmp_path: Path) -> None:
    server.reset()
    server.add("org/gated", {"config.json": b"{}"}, gated="manual")
    (tmp_path / "recipe.yaml").write_text(GATED)
    environment = server.environment(str(tmp_path / "home"), token=None)
    done = run(["ckpt-train", "recipe.yaml"], tmp_path, environment)
    assert done.returncode == 2
    # One problem, and nothing before it.
    assert len(done.stderr.splitlines()) == 4
    assert f"request access at {server.endpoint}/org/gated, then `hf auth login`" in done.stderr
    assert "Retrying" not in done.stderr
    requests = [each for each in server.requests if "/org/gated" in each]
    assert requests == ["HEAD /org/gated/resolve/main/config.json"]
