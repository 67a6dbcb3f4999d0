"""Reads of an export: past the page cache at any position, and from it where it has the bytes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint.export import input as input_module
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.input import Inputs, _Input
from automodel_ckpt.checkpoint.files.direct import SECTOR_BYTES, block_of
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models.shards import cut, write_checkpoint

NUM_BYTES = 3 * (1 << 20) + 100


@pytest.fixture
def data() -> bytes:
    return os.urandom(NUM_BYTES)


@pytest.fixture
def source(tmp_path: Path, data: bytes) -> Iterator[_Input]:
    path = tmp_path / "data"
    path.write_bytes(data)
    opened = _Input(os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY))
    with path.open("rb") as file:
        os.fsync(file.fileno())  # the kernel does not drop pages that are not on the disk yet
    if not opened._is_direct:
        pytest.skip("this file system has no direct reads")
    yield opened
    opened.close()


@pytest.mark.parametrize("start", [0, 1, SECTOR_BYTES - 1, SECTOR_BYTES, 2 * SECTOR_BYTES + 7])
@pytest.mark.parametrize("nbytes", [1, SECTOR_BYTES, 2 * (1 << 20) + 5])
def test_a_direct_read_returns_all_bytes_wherever_they_begin(
    source: _Input, data: bytes, start: int, nbytes: int
) -> None:
    memory = memoryview(bytearray(nbytes))
    bounce = block_of(16 * SECTOR_BYTES)
    assert source.read_past_cache(start, memory, bounce) == nbytes
    assert memory == data[start : start + nbytes]


def test_a_direct_read_ends_where_the_file_ends(source: _Input, data: bytes) -> None:
    memory = memoryview(bytearray(1000))
    bounce = block_of(16 * SECTOR_BYTES)
    start = NUM_BYTES - 600
    assert source.read_past_cache(start, memory, bounce) == 600
    assert memory[:600] == data[start:]
    assert source.read_past_cache(NUM_BYTES + 10, memory, bounce) == 0


def test_the_last_bytes_of_a_file_are_looked_up_in_the_page_cache_and_bytes_after_it_are_not(
    source: _Input, tmp_path: Path
) -> None:
    nbytes = 1 << 17
    assert source.is_cached(NUM_BYTES - nbytes, nbytes)
    with (tmp_path / "data").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if source.is_cached(0, nbytes):
        pytest.skip("this file system does not drop its pages")
    assert not source.is_cached(NUM_BYTES - nbytes, nbytes)
    # An ordinary read finds the end of the file and reports it.
    assert source.is_cached(NUM_BYTES - nbytes + 1, nbytes)


@pytest.mark.parametrize(("start", "nbytes"), [(0, 100), (1, SECTOR_BYTES), (7, 100)])
def test_reads_that_are_not_aligned_do_not_end_direct_reads(
    source: _Input, data: bytes, start: int, nbytes: int
) -> None:
    # The memory is aligned, so that only the position and the length are not.
    memory = block_of(2 * SECTOR_BYTES)[:nbytes]
    assert source.read_past_cache(start, memory, block_of(16 * SECTOR_BYTES)) == nbytes
    assert memory == data[start : start + nbytes] and source._is_direct


def test_a_direct_read_past_the_end_of_whole_sectors_ends(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(b"x" * 2 * SECTOR_BYTES)
    opened = _Input(os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY))
    memory = block_of(4 * SECTOR_BYTES)
    bounce = block_of(16 * SECTOR_BYTES)
    if opened._is_direct:
        assert opened.read_past_cache(0, memory, bounce) == 2 * SECTOR_BYTES
        assert opened.read_past_cache(1, memory[: 3 * SECTOR_BYTES], bounce) == 2 * SECTOR_BYTES - 1
    assert opened.read_cached(0, memory) == 2 * SECTOR_BYTES
    assert opened.read_cached(2 * SECTOR_BYTES, memory) == 0
    opened.close()


def opened_below(directory: Path) -> list[str]:
    """What of a directory this process has open or mapped."""
    found = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if target.startswith(str(directory)):
                found.append(target)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(directory) in line:
            found.append(line)
    return found


def test_few_files_are_open_at_a_time_and_none_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_module, "_MAX_OPEN", 3)
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 5000)
    inputs = Inputs(tmp_path)
    memory = memoryview(bytearray(5000))
    for number in (0, 1, 2, 0, 3, 4, 5, 1):
        inputs.read(str(number), 0, memory)
        assert bytes(memory) == bytes([number]) * 5000
        # Two descriptors and a map for each file.
        assert len(opened_below(tmp_path)) <= 9
    # The files that were read last are the ones that stay open.
    still = {Path(name).name for name in opened_below(tmp_path) if "/" in name[:1]}
    assert still == {"4", "5", "1"}
    with pytest.raises(CheckpointUnusable, match="the file ends here"):
        inputs.read("1", 4000, memory)
    inputs.close()
    assert opened_below(tmp_path) == []


def test_an_export_leaves_nothing_open(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(600, 40), "b": torch.ones(3)}
    pieces = [piece for name, value in tensors.items() for piece in cut(name, value, 3, dim=0)]
    write_checkpoint(tmp_path / "c", tensors, pieces)
    consolidate(tmp_path / "c")
    consolidate(tmp_path / "c", tmp_path / "cast", cast_dtype="bf16")
    assert opened_below(tmp_path) == []


WORKERS = r"""
import os, time
from automodel_ckpt.checkpoint.export.copy_engine import Workers

def wait(share, num_threads):
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(60)

Workers(2, 1).run(wait, [[], []])
"""


def test_the_processes_of_an_export_end_with_it() -> None:
    command = [sys.executable, "-c", WORKERS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        parent.wait()
        end = time.monotonic() + 60
        while any(is_running(pid) for pid in workers):
            assert time.monotonic() < end
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
