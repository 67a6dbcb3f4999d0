"""`make clients` reads what AutoModel's checkpointer writes, and after an error of a client the others are asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.clients import __main__ as clients

FIXTURES = Path(__file__).parents[1] / "fixtures" / "automodel"


def test_checkpoints_of_automodel_are_exported_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_fixtures(python: Path, script: Path, arguments: list[Path], output: Any) -> None:
        assert script == FIXTURES / "make_fixture.py"
        shutil.copytree(FIXTURES, arguments[0], dirs_exist_ok=True)

    monkeypatch.setattr(clients, "_run", copy_fixtures)
    checks = clients._read_theirs(Path(sys.executable), tmp_path / "theirs", None)
    assert [check[1:] for check in checks] == [
        ["its checkpoint (safetensors) is exported here", "0 tensors differ", True],
        ["its checkpoint (torch_save) is exported here", "0 tensors differ", True],
    ]


@pytest.mark.parametrize(
    "error", [subprocess.CalledProcessError(1, "pip"), RuntimeError("two lines\n  of text")]
)
def test_any_error_of_a_client_is_a_failed_check(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(clients, "HOME", tmp_path)
    monkeypatch.setattr(clients, "python_of", lambda *_: Path(sys.executable))
    monkeypatch.setattr(clients, "_run", fail)
    answer = clients._ask("vllm", clients.CLIENTS["vllm"], tmp_path / "job.json", tmp_path)
    ((_, _, found, good),) = answer["checks"]
    assert not good
    assert type(error).__name__ in found
    assert "\n" not in found
    assert "Traceback" in (tmp_path / "vllm.log").read_text()
