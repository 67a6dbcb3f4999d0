"""Any system call of a save or an export may fail: nothing incomplete is left, and the next attempt succeeds."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.checkpoint.export.files import staged
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of, file_record
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import verify_deep
from automodel_ckpt.convert.publishing import published_directory
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from tests.support.checkpoints import consolidate, is_intact
from tests.support.models import tiny
from tests.support.models.shards import cut, write_checkpoint
from tests.support.runs.stored_runs import SECOND, write_run


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


_MOST = 1000


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every positioned read and write transfer at most 1,000 bytes."""
    read, write = os.preadv, os.pwrite

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        (buffer,) = buffers
        return read(descriptor, [memoryview(buffer)[:_MOST]], offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, memoryview(data)[:_MOST], at))


@pytest.mark.usefixtures("short")
def test_all_bytes_of_a_file_are_digested(tmp_path: Path) -> None:
    data = os.urandom(2 * _MOST + 1)
    (tmp_path / "file").write_bytes(data)
    assert file_record(tmp_path / "file") == FileRecord(len(data), digest_of(data))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "options", [{}, {"model_save_format": "torch_save"}, {"model_layout": "hf"}]
)
def test_what_is_written_and_read_in_short_transfers_is_whole(
    tmp_path: Path, options: dict[str, str]
) -> None:
    made = tiny.recipe(seed=1)
    made.model.register_buffer("large", torch.arange(5000.0))
    tiny.train(made)
    path = tiny.save(tmp_path, made, **options).path
    assert is_intact(path, deep=True)
    other = tiny.recipe(seed=2)
    other.model.register_buffer("large", torch.zeros(5000))
    assert tiny.load(tmp_path, other) is not None
    tiny.assert_equal_state(made, other)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let directories of the name "closed" be unreadable, also for the superuser."""
    scandir = os.scandir

    def denied(path: Any = ".") -> Any:
        # The numbers are descriptors of fsync_directory().
        if not isinstance(path, int) and os.path.basename(path) == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)


def test_nothing_is_published_with_a_directory_that_is_not_durable(
    tmp_path: Path, closed: None
) -> None:
    staging = commit.reserve(tmp_path, SECOND)
    (staging / "closed").mkdir()
    with pytest.raises(PermissionError, match="closed"):
        commit.finalize(staging, b"{}")
    assert not (staging / layout.MANIFEST).exists()
    target = tmp_path / "export"
    for publishing in (staged(target, print), published_directory(target, print)):
        with pytest.raises(SaveFailed, match="EACCES"), publishing as made:
            (made / "closed").mkdir()
        assert not target.exists()


def test_deep_verification_reports_a_directory_that_cannot_be_read(
    tmp_path: Path, closed: None
) -> None:
    write_run(tmp_path)
    checkpoint = tmp_path / SECOND
    (checkpoint / "closed").mkdir()
    (problem,) = verify_deep(checkpoint, Manifest.read(checkpoint))
    assert problem.what == "a directory cannot be read"
    assert problem.where == str(checkpoint / "closed")
    assert "EACCES" in str(problem.value) and problem.hint
