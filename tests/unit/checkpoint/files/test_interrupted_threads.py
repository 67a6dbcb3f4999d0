"""After an interruption (Ctrl-C in a notebook), no thread uses a file that the caller has closed."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.base.durable_io import write_all
from automodel_ckpt.checkpoint.files import durable_file
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.formats import reading
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.convert.open import open_weights
from automodel_ckpt.errors import CheckpointUnusable

MIB = 1 << 20


@contextmanager
def interrupting() -> Iterator[Callable[[], None]]:
    """Yields a function for other threads that raises KeyboardInterrupt in the main thread during the context."""
    is_over = threading.Event()

    def interrupt() -> None:
        if not is_over.is_set():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGUSR2)

    def raise_it(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, raise_it)
    try:
        yield interrupt
    finally:
        is_over.set()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("finish", [True, False])
def test_an_interrupted_write_does_not_reach_the_next_file(
    finish: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    has_begun = threading.Event()
    with interrupting() as interrupt:

        def slow(*arguments: Any) -> None:
            has_begun.set()
            time.sleep(0.2)
            interrupt()
            time.sleep(0.2)
            write_all(*arguments)

        # As on a file system without O_DIRECT.
        monkeypatch.setattr(
            durable_file.DirectStream, "_past_cache", lambda *arguments: arguments[3]
        )
        file = DurableFile(tmp_path / "interrupted", nbytes=16 * MIB)
        file.write(b"\1" * (MIB + 1))
        monkeypatch.setattr(durable_file, "write_all", slow)
        if not finish:
            file.write(b"\1" * (4 * MIB))
            has_begun.wait()
        with pytest.raises(KeyboardInterrupt):
            file.__exit__(None if finish else ValueError, None, None)
    # It gets the same descriptor.
    with open(tmp_path / "next", "wb") as other:
        time.sleep(0.6)
        assert os.fstat(other.fileno()).st_size == 0
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_an_interrupted_read_does_not_change_tensors_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PARALLEL_FROM_BYTES", 1)
    save_file({"w": torch.ones(3 * MIB)}, tmp_path / "a.safetensors")
    source = open_weights(tmp_path).modules["model"]
    target = torch.zeros(3 * MIB)
    original = os.preadv
    with interrupting() as interrupt:

        def slow(descriptor: int, buffers: list[memoryview], start: int) -> int:
            for _ in range(3):
                time.sleep(0.1)
                interrupt()
            time.sleep(0.1)
            return original(descriptor, buffers, start)

        monkeypatch.setattr(os, "preadv", slow)
        with pytest.raises(KeyboardInterrupt):
            read_tree(source.root, Tree("", dict(source.tensors), {}), {"w": target})
    found = target.clone()
    # It gets the same descriptor.
    with open(tmp_path / "next", "w+b") as other:
        other.write(b"\7" * (16 * MIB))
        other.flush()
        time.sleep(0.6)
    assert torch.equal(target, found)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of 3 MB, which are read by threads."""
    monkeypatch.setattr(reading, "_PARALLEL_FROM_BYTES", 1)
    for name in "ab":
        save_file({name: torch.randn(750, 1000)}, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("damaged", "error"), [("truncated", CheckpointUnusable), ("missing", OSError)]
)
def test_an_error_of_a_thread_names_the_first_file_and_leaves_none_open(
    stored: Path, damaged: str, error: type[Exception]
) -> None:
    source = open_weights(stored).modules["model"]
    tree = Tree("", dict(source.tensors), {})
    for name in "ab":
        if damaged == "missing":
            (stored / f"{name}.safetensors").unlink()
        else:
            os.truncate(stored / f"{name}.safetensors", 2 << 20)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=r"a\.safetensors"):
        read_tree(source.root, tree, {name: torch.empty(750, 1000) for name in "ab"})
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_strided_tensor_of_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"transposed": torch.randn(100, 200).t()}, path)
    source = open_weights(tmp_path).modules["model"]
    os.truncate(path, 40_000)
    with pytest.raises(CheckpointUnusable, match=r"pytorch_model\.bin"):
        read_tree(
            source.root, Tree("", dict(source.tensors), {}), {"transposed": torch.empty(200, 100)}
        )
