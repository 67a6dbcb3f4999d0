"""Which bytes fill an output file: every element once, in order, however a tensor is cut and a file is divided."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from automodel_ckpt.checkpoint.export import blocks as export_blocks
from automodel_ckpt.checkpoint.export.blocks import blocks, elements_before, shares
from automodel_ckpt.checkpoint.export.plan import ExportTensor, OutputFile
from automodel_ckpt.checkpoint.parts.slices import Box, Slice, Tensor, nbytes_of, row_major_boxes

SHAPES = [(), (1,), (7,), (3, 5), (4, 1, 6), (2, 3, 4, 5), (1, 9)]


def positions(box: Box, shape: tuple[int, ...]) -> list[int]:
    """The flat numbers of a box's elements."""
    flat = np.arange(math.prod(shape)).reshape(shape)
    part = flat[(*(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)), ...)]
    return [int(value) for value in part.reshape(-1)]


def grid(shape: tuple[int, ...], random_cuts: random.Random) -> list[Box]:
    """The shape cut at random along every dimension."""
    cuts = []
    for extent in shape:
        inner = (
            sorted(random_cuts.sample(range(1, extent), random_cuts.randrange(min(3, extent))))
            if extent > 1
            else []
        )
        cuts.append(list(itertools.pairwise([0, *inner, extent])))
    return [
        Box(tuple(a for a, _ in choice), tuple(b - a for a, b in choice))
        for choice in itertools.product(*cuts)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_range_of_elements_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    for first, last in itertools.combinations(range(numel + 1), 2):
        found = [
            position
            for box in row_major_boxes(shape, first, last)
            for position in positions(box, shape)
        ]
        assert found == list(range(first, last))
        assert len(list(row_major_boxes(shape, first, last))) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_elements_of_a_box_before_a_place_are_counted(shape: tuple[int, ...]) -> None:
    for box in grid(shape, random.Random(3)):
        inside = positions(box, shape)
        for flat in range(math.prod(shape) + 1):
            assert elements_before(box, shape, flat) == sum(position < flat for position in inside)


def stored(fqn: str, dtype: str, shape: tuple[int, ...], cuts: random.Random) -> Tensor:
    slices, start = [], 0
    for box in grid(shape, cuts):
        nbytes = nbytes_of(dtype, box.sizes)
        slices.append(Slice(fqn, dtype, box.offsets, box.sizes, f"{fqn}.bin", start, nbytes))
        start += nbytes
    cuts.shuffle(slices)
    return Tensor(fqn, dtype, shape, tuple(slices))


@pytest.mark.parametrize("seed", range(30))
def test_blocks_fill_every_byte_once_and_read_every_slice_front_to_back(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    cuts = random.Random(seed)
    monkeypatch.setattr(export_blocks, "BLOCK_BYTES", cuts.choice([16, 48, 64, 1024]))
    files = []
    for number in range(cuts.randrange(1, 4)):
        shapes = [cuts.choice([*SHAPES, (0, 3), (64, 3)]) for _ in range(cuts.randrange(1, 6))]
        tensors = [
            ExportTensor(
                f"{number}.{i}",
                stored(f"{number}.{i}", cuts.choice(["F32", "F64"]), shape, cuts),
                "F32",
            )
            for i, shape in enumerate(shapes)
        ]
        header = b"h" * cuts.choice([8, 4096])
        nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        files.append(OutputFile(f"file{number}", header, nbytes, tuple(tensors)))
    filled = {file.name: len(file.header) for file in files}
    read: dict[Slice, int] = {}
    for share in shares(files, cuts.randrange(1, 5)):
        for count, block in enumerate(blocks(share)):
            assert block.number == count and block.start == filled[block.file] < block.stop
            assert (
                sum(segment.stop - segment.start for segment in block.segments)
                == block.stop - block.start
            )
            filled[block.file] = block.stop
            for segment in block.segments:
                shape, total = segment.tensor.stored.shape, 0
                for part in segment.reads:
                    assert part.at == read.get(part.stored, 0)
                    assert part.is_last is (part.at + part.nbytes == part.stored.nbytes)
                    read[part.stored] = part.at + part.nbytes
                    total += part.nbytes
                assert total == nbytes_of(
                    segment.tensor.stored.dtype, (segment.last - segment.first,)
                )
                if segment.as_is:
                    offsets = [
                        positions(p.stored.box, shape)[p.at // 4 : (p.at + p.nbytes) // 4]
                        for p in segment.reads
                    ]
                    assert list(itertools.chain(*offsets)) == list(
                        range(segment.first, segment.last)
                    )
    assert filled == {file.name: file.nbytes for file in files}
    held = {
        piece
        for file in files
        for tensor in file.tensors
        for piece in tensor.stored.slices
        if piece.nbytes
    }
    assert read == {piece: piece.nbytes for piece in held}


def test_shares_are_about_equal_in_bytes() -> None:
    whole = [
        Tensor(str(n), "U8", (100,), (Slice(str(n), "U8", (0,), (100,), "f", 0, 100),))
        for n in range(40)
    ]
    file = OutputFile(
        "one", b"", 4000, tuple(ExportTensor(tensor.fqn, tensor, "U8") for tensor in whole)
    )
    for count in (1, 2, 3, 7):
        sizes = [share[0].stop - share[0].start for share in shares([file], count)]
        assert len(sizes) == count and sum(sizes) == 4000 and max(sizes) - min(sizes) <= 100
