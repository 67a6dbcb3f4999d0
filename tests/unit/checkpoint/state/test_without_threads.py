"""Where no thread can start, at a limit or while the process ends, the calling thread saves and loads."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover

MIB = 1 << 20


def made() -> SimpleNamespace:
    """A model whose files are written directly, with checksums of threads; the frozen part is shared by saves."""
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(torch.randn(9 * MIB))
    model.frozen = torch.nn.Parameter(torch.randn(3 * MIB), requires_grad=False)
    return SimpleNamespace(model=model)


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def save(checkpointer: Checkpointer, state: SimpleNamespace, step: int) -> None:
    checkpointer.save(
        discover(state), step=step, epoch=0, config_yaml="", losses={"step": step}, progress={}
    )


@pytest.mark.parametrize("model_save_format", ["safetensors", "torch_save"])
def test_a_run_saves_and_loads(
    model_save_format: Literal["safetensors", "torch_save"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = CheckpointOptions(model_save_format=model_save_format, incremental=True)
    checkpointer = Checkpointer(tmp_path, options=options)
    state = made()
    save(checkpointer, state, 1)
    with torch.no_grad():
        state.model.trained += 1
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        save(checkpointer, state, 2)
        found = made()
        resumed = checkpointer.load(discover(found))
    checkpointer.close()
    assert resumed is not None and resumed.step == 2
    for name, value in state.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)


def test_a_directory_is_free_after_its_run_could_not_start_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        checkpointer = Checkpointer(tmp_path)
        with pytest.raises(Exception, match="cannot start a thread"):
            save(checkpointer, made(), 1)
    assert not (tmp_path / ".run.lock").exists()
    save(checkpointer, made(), 1)
    checkpointer.close()
