"""Any system call of a save or an export may fail: nothing incomplete is left, and the next attempt succeeds."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from tests.support.checkpoints import consolidate, is_intact
from tests.support.models import tiny
from tests.support.models.shards import cut, write_checkpoint


@contextmanager
def failing(call: str, number: int) -> Iterator[list[str]]:
    """Let call *number* of ``os.CALL`` fail, from 0. Yields a list with the failed call."""
    real, failed = getattr(os, call), list[str]()
    numbers = itertools.count()

    def fail(*arguments: Any, **more: Any) -> Any:
        if next(numbers) == number:
            failed.append(call)
            raise OSError(errno.EIO, os.strerror(errno.EIO), "the disk")
        return real(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fail)
        yield failed


def each_failure(call: str, attempt: Callable[[int], object]) -> Iterator[tuple[int, bool]]:
    """Run *attempt* with a number from 0 until no call of ``os.CALL`` is left to fail: in each, the next call fails.

    Yields the number and whether the attempt succeeded all the same. Otherwise its error has a hint.
    """
    for number in itertools.count():
        error = None
        with failing(call, number) as failed:
            try:
                attempt(number)
            except (CheckpointUnusable, SaveFailed) as caught:
                error = caught
        if not failed:
            assert error is None and number > 0, f"{call} was not called"
            return
        assert error is None or ("Input/output error" in str(error) and "hint:" in str(error))
        yield number, error is None


@pytest.mark.parametrize("call", ["fsync", "mkdir", "pwrite", "rename", "symlink", "unlink"])
def test_a_save_with_a_failing_call_leaves_complete_checkpoints_only(
    tmp_path: Path, call: str
) -> None:
    made = tiny.recipe(seed=1)
    tiny.train(made)
    tiny.save(tmp_path, made, step=1)
    for number, is_saved in each_failure(call, lambda i: tiny.save(tmp_path, made, step=i + 2)):
        assert (tmp_path / f"epoch_0_step_{number + 2}").exists() == is_saved
        assert is_intact(tmp_path / "LATEST", deep=True)
    # The last attempt met no failure. It also removed what the others had left.
    assert not [path for path in tmp_path.iterdir() if ".staging-" in path.name]
    other = tiny.recipe(seed=2)
    resumed = tiny.load(tmp_path, other)
    assert resumed is not None and resumed.step == number + 3
    tiny.assert_equal_state(made, other)


@pytest.mark.parametrize(
    ("call", "can_swap"),
    [
        ("fsync", True),
        ("ftruncate", True),
        ("preadv", True),
        ("pwrite", True),
        ("fsync", False),
        ("rename", False),
    ],
)
def test_an_export_with_a_failing_call_leaves_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    tensors = {"a": torch.randn(1_200_000), "b": torch.randn(1_200_000)}
    slices = [each for name, tensor in tensors.items() for each in cut(name, tensor, 2)]
    write_checkpoint(tmp_path, tensors, slices)
    output = consolidate(tmp_path).output
    before = output.stat().st_ino
    for _, is_exported in each_failure(call, lambda _: consolidate(tmp_path, num_threads=2)):
        found = load_file(output / "model-00001-of-00001.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert not [path for path in output.parent.iterdir() if path.name.startswith(".")]
        # The error says that nothing was changed: it is the export of before.
        assert not is_exported and output.stat().st_ino == before
