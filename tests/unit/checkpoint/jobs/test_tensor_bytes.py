"""The bytes of a tensor on a device reach a file through two small buffers, unchanged."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint.files.durable_file import begins_at_a_sector, digest_of
from automodel_ckpt.checkpoint.jobs.jobs import Blocks, Chunk, FileJob, SharedFile
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.state.storable import blocks_of


def content(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("start", [0, 1, 64, 448, 512, 4032])
def test_no_block_is_aligned_for_o_direct_wherever_its_memory_begins(start: int) -> None:
    def allocate(size: int) -> torch.Tensor:
        memory = torch.empty(size + 3 * 4096, dtype=torch.uint8)
        first = -memory.data_ptr() % 4096 + start
        return memory[first : first + size]

    for block in blocks_of(content(250), block_bytes=100, allocate=allocate):
        assert not begins_at_a_sector(block), "O_DIRECT would write it after it was overwritten"


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 250])
def test_blocks_have_all_bytes_in_order_and_use_at_most_two_buffers(nbytes: int) -> None:
    flat = content(nbytes)
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    found = b""
    for block in blocks_of(flat, block_bytes=100, allocate=allocate):
        assert not begins_at_a_sector(block), "O_DIRECT would write it after it was overwritten"
        found += bytes(block)
    assert found == flat.numpy().tobytes()
    assert len(sizes) == (2 if nbytes > 100 else 1)
    assert max(sizes) <= 164


@dataclass(frozen=True)
class OnDevice:
    """Data of a tensor elsewhere, which must not be fetched whole."""

    flat: torch.Tensor

    def __call__(self) -> Blocks:
        return Blocks(self.flat.numel(), partial(blocks_of, self.flat, block_bytes=1 << 20))


def entry(name: str, nbytes: int) -> Tensor:
    return Tensor(name, "U8", (nbytes,), (Slice(name, "U8", (0,), (nbytes,), "x", 0, nbytes),))


def test_a_file_of_device_tensors_has_their_bytes_and_digests(tmp_path: Path) -> None:
    # Larger than a block of O_DIRECT and not a multiple of it, and a small one.
    tensors = [content((9 << 20) + 5), content(300)]
    chunks, start = [], 0
    for number, flat in enumerate(tensors):
        chunks.append(Chunk(start, OnDevice(flat), entry(str(number), flat.numel())))
        start += flat.numel()
    written = RankManifest(0)
    FileJob("model/x", chunks, "model", nbytes=start).run(tmp_path, written, memoryview(b""))
    expected = b"".join(flat.numpy().tobytes() for flat in tensors)
    assert (tmp_path / "model/x").read_bytes() == expected
    digests = [tensor.slices[0].digest for tensor in written.trees["model"].tensors]
    assert digests == [digest_of(flat.numpy().data) for flat in tensors]
    assert written.files["model/x"].digest == digest_of(expected)


def test_a_file_with_several_names_is_never_opened_for_writing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"shared")
    os.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OSError, match="several names"):
        SharedFile(tmp_path / "b", nbytes=3)
    assert (tmp_path / "a").read_bytes() == b"shared"
