"""Files whose checksums other threads compute are those of one thread, and no thread outlives a failed save."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.files.digests import digest_of
from automodel_ckpt.checkpoint.files.direct import block_of
from automodel_ckpt.checkpoint.jobs import jobs
from automodel_ckpt.checkpoint.jobs.checksums import combined
from automodel_ckpt.checkpoint.jobs.jobs import Blocks, Chunk, Data, FileJob, Span, run_all
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest
from automodel_ckpt.checkpoint.jobs.tensor_bytes import blocks_of
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor

MIB = 1 << 20
# Short ones, whole blocks, and lengths with a rest; 40 MiB in all, so that threads take part.
SIZES = [(4 * MIB) - 100, 300, 9 * MIB + 5, 0, 4 * MIB, 2 * MIB, 1, 16 * MIB + 77, 5 * MIB]
HEAD, TAIL = 60, 900


@dataclass(frozen=True)
class OnDevice:
    """Data of a tensor elsewhere, which is copied in blocks."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def __call__(self) -> memoryview:
        raise AssertionError("it is copied in blocks")

    def contents(self) -> Blocks:
        flat = torch.frombuffer(bytearray(self.data or b"\0"), dtype=torch.uint8)[: len(self.data)]
        allocate = partial(torch.empty, dtype=torch.uint8)
        return Blocks(
            len(self.data), partial(blocks_of, flat, block_bytes=8 * MIB, allocate=allocate)
        )


def entry(name: str, nbytes: int) -> Tensor:
    return Tensor(name, "U8", (nbytes,), (Slice(name, "U8", (0,), (nbytes,), "x", 0, nbytes),))


def archives(
    sizes: list[int], place: Callable[[int, bytes], Data]
) -> tuple[FileJob, bytes, list[str]]:
    """A job of archives, the content of its file, the digests of its tensors. *place* takes a position and bytes."""
    chunks: list[Chunk] = []
    content = bytearray()
    digests: list[str] = []

    def add(data: bytes, *, crc_at: tuple[int, ...] = (), tensor: Tensor | None = None) -> None:
        at = len(content)
        is_fetched = tensor is not None
        chunks.append(
            Chunk(at, place(at, data) if is_fetched else constant(at, data), tensor, crc_at)
        )
        content.extend(data)

    def constant(at: int, data: bytes) -> Data:
        placed = place(at, data)
        return placed if isinstance(placed, Span) else data

    for number, size in enumerate(sizes):
        data = os.urandom(size)
        add(os.urandom(HEAD))
        add(data, tensor=entry(str(number), size))
        tail = os.urandom(TAIL)
        add(tail, crc_at=(4, TAIL - 4))
        crc = zlib.crc32(data).to_bytes(4, "little")
        content[-TAIL:] = tail[:4] + crc + tail[8:-4] + crc
        digests.append(digest_of(data))
    return FileJob("optim/x", chunks, "optim", len(content)), bytes(content), digests


def in_memory(memory: memoryview, first: int) -> Callable[[int, bytes], Data]:
    """Places data in *memory*, the file's from byte *first* on."""

    def place(at: int, data: bytes) -> Span:
        memory[first + at : first + at + len(data)] = data
        return Span(first + at, len(data))

    return place


def some_memory() -> memoryview:
    return block_of(sum(SIZES) + len(SIZES) * (HEAD + TAIL) + 8192)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(jobs, "num_threads", lambda: request.param)
    return int(request.param)


def slowed(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], object]) -> None:
    """Call *before* with the data of each CRC-32 that a thread of the pool computes."""
    original = zlib.crc32

    def crc32(data: Any, *rest: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            before(data)
        return original(data, *rest)

    monkeypatch.setattr(zlib, "crc32", crc32)


@pytest.mark.parametrize("kind", ["aligned", "unaligned", "bytes", "device"])
def test_the_file_and_its_entries_are_those_of_one_thread(
    kind: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slower than the writes: a block that is written before its checksum is known would be wrong.
    slowed(monkeypatch, lambda _: time.sleep(0.002))
    memory = some_memory()
    places: dict[str, Callable[[int, bytes], Data]] = {
        "aligned": in_memory(memory, 4096),
        "unaligned": in_memory(memory, 77),
        "bytes": lambda _, data: lambda: memoryview(data),
        "device": lambda _, data: OnDevice(data),
    }
    job, content, digests = archives(SIZES, places[kind])
    written = RankManifest(0)
    run_all([job], tmp_path, written, memory)
    assert (tmp_path / "optim/x").read_bytes() == content
    assert [tensor.slices[0].digest for tensor in written.trees["optim"].tensors] == digests
    assert [tensor.fqn for tensor in written.trees["optim"].tensors] == [
        str(number) for number in range(len(SIZES))
    ]
    assert written.files["optim/x"].digest == digest_of(content)
    # The same without threads.
    alone = RankManifest(0)
    (tmp_path / "optim/x").unlink()
    job.run(tmp_path, alone, memory)
    assert (tmp_path / "optim/x").read_bytes() == content
    assert alone.to_bytes() == written.to_bytes()


@pytest.mark.parametrize("nbytes", [0, 1, 3, 64, 1000, 4 * MIB, 4 * MIB + 1])
def test_a_crc_is_combined_from_those_of_two_ranges(nbytes: int) -> None:
    first, second = os.urandom(1000), os.urandom(nbytes)
    assert combined(zlib.crc32(first), zlib.crc32(second), nbytes) == zlib.crc32(first + second)
    assert combined(0, zlib.crc32(second), nbytes) == zlib.crc32(second)
