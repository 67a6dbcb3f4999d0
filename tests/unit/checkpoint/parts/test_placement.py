"""Where slices go in files that several ranks fill: over random layouts, by plain arithmetic and with real files."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.checkpoint.files import direct
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.formats.hf import FileLayout, lay_out_tensors
from automodel_ckpt.checkpoint.jobs import shared_file
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob, run_all
from automodel_ckpt.checkpoint.jobs.rank_manifest import (
    RankManifest,
    merge_shared_files,
    merge_tree,
)
from automodel_ckpt.checkpoint.parts.merkle import FileContents, damaged, head_fits
from automodel_ckpt.checkpoint.parts.slices import Box, Slice, Tensor, nbytes_of, runs_in_file
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from tests.support.models.shards import bits, raw_bytes

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
Layout = dict[str, Tensor]


def random_boxes(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """The shape cut into a grid, unevenly, in up to two dimensions."""
    cuts = []
    dims = rng.sample(range(len(shape)), min(len(shape), rng.choice([0, 1, 1, 2])))
    for dim, extent in enumerate(shape):
        inner = (
            sorted(rng.sample(range(1, extent), rng.randint(0, min(3, extent - 1))))
            if dim in dims and extent > 1
            else []
        )
        cuts.append(list(itertools.pairwise([0, *inner, extent])))
    return [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*cuts)
    ]


def random_layout(rng: random.Random, *, dtypes: list[str]) -> Layout:
    tensors = {}
    for number in range(rng.randint(1, 8)):
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.choice([0, 1, 2, 2, 3])))
        fqn, dtype = f"t{number}", rng.choice(dtypes)
        slices = tuple(
            Slice(fqn, dtype, box.offsets, box.sizes, "", 0, nbytes_of(dtype, box.sizes))
            for box in random_boxes(rng, shape)
        )
        tensors[fqn] = Tensor(fqn, dtype, shape, slices)
    return tensors


def random_file_layout(rng: random.Random, tensors: Layout) -> tuple[FileLayout, dict[str, str]]:
    """A file_layout split by size, or as in a base's index with tying."""
    kind, names = rng.choice(["size", "base"]), list(tensors)
    if kind == "size":
        return lay_out_tensors(tensors, "model", max_file_bytes=rng.choice([1, 20, 200, 10**9])), {}
    tied = {"alias": rng.choice(names)}
    kept = rng.choice([[*names, "alias"], [n for n in names if n != tied["alias"]] + ["alias"]])
    shapes = {n: tensors[tied.get(n, n)].shape for n in kept}
    index = {n: rng.randint(1, 3) for n in kept}
    return lay_out_tensors(tensors, "model", tied=tied, maps=BaseMaps(index, None, shapes)), tied


def entries(tensors: Layout, file_layout: FileLayout) -> list[Tensor]:
    return [
        file_layout.entry(tensor, piece.box, where)
        for fqn, tensor in tensors.items()
        for piece in tensor.slices
        for where in file_layout.positions[fqn]
    ]


def test_every_byte_of_every_file_belongs_to_exactly_one_slice_over_3000_random_layouts() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        tensors = random_layout(rng, dtypes=list(DTYPES))
        file_layout, _ = random_file_layout(rng, tensors)
        runs: dict[str, list[tuple[int, int]]] = {
            f"model/{file.name}": [(0, len(file.header))] for file in file_layout.files
        }
        for entry in entries(tensors, file_layout):
            (piece,) = entry.slices
            ends = [
                (run.source, run.source + run.nbytes) for run in runs_in_file(piece, entry.shape)
            ]
            assert sum(b - a for a, b in ends) == piece.nbytes
            runs[piece.file] += [end for end in ends if end[1] > end[0]]
        for file in file_layout.files:
            found = sorted(runs[f"model/{file.name}"])
            assert [b for _, b in found] == [*(a for a, _ in found[1:]), file.nbytes], file.name
            assert len(file.header) % 4096 == 0


def random_values(tensor: Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
    raw = raw % 2 if tensor.dtype == "BOOL" else raw
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def jobs_of(
    rng: random.Random,
    tensors: Layout,
    file_layout: FileLayout,
    values: dict[str, torch.Tensor],
    size: int,
):  # type: ignore[no-untyped-def]
    """Each of *size* ranks' jobs, its slices drawn by lot; rank 0 makes the files."""
    shares: list[dict[str, list[Chunk]]] = [
        {f"model/{f.name}": [] for f in file_layout.files} for _ in range(size)
    ]
    for fqn, tensor in tensors.items():
        for piece in tensor.slices:
            mine = rng.choice(shares)
            for where in file_layout.positions[fqn]:
                entry = file_layout.entry(tensor, piece.box, where)
                data = raw_bytes(values[fqn], piece.box)
                start = entry.slices[0].start
                chunk = Chunk(start, data, entry, is_copy=where.is_copy)
                mine[where.file].append(chunk)
    for file in file_layout.files:
        shares[0][f"model/{file.name}"].insert(0, Chunk(0, file.header))
    return [
        [
            FileJob(name, share[name], "model", file.nbytes, is_shared=True)
            for file in file_layout.files
            if (name := f"model/{file.name}")
        ]
        for share in shares
    ]


@pytest.mark.parametrize("block", [None, 4096])
def test_ranks_that_write_at_once_make_files_that_safetensors_reads_and_whose_digest_is_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int | None
) -> None:
    if block is not None:
        for module in (shared_file, direct):
            monkeypatch.setattr(module, "BLOCK_BYTES", block)
        monkeypatch.setattr(shared_file, "_STREAM_FROM_BYTES", 1)
        monkeypatch.setattr(shared_file, "DIRECT_FROM_BYTES", 1)
    rng = random.Random(2)
    for turn in range(25):
        tensors = random_layout(rng, dtypes=list(DTYPES))
        if block is not None:
            tensors["big"] = big(rng)
        file_layout, tied = random_file_layout(rng, tensors)
        values = {fqn: random_values(tensor, turn) for fqn, tensor in tensors.items()}
        staging = tmp_path / str(turn)
        (staging / "model").mkdir(parents=True)
        parts = [RankManifest(rank) for rank in range(3)]
        with ThreadPoolExecutor(3) as pool:
            list(
                pool.map(
                    run_all, jobs_of(rng, tensors, file_layout, values, 3), [staging] * 3, parts
                )
            )
        parts = [RankManifest.parse(part.to_bytes()) for part in parts]
        found = {}
        for file in file_layout.files:
            found |= load_file(staging / "model" / file.name)
            assert read_header(staging / "model" / file.name).metadata == {"format": "pt"}
        by_key = {
            where.key: values[fqn]
            for fqn, places in file_layout.positions.items()
            for where in places
        }
        assert found.keys() == by_key.keys()
        assert all((bits(found[key]) == bits(value)).all() for key, value in by_key.items())
        merged = merge_tree("model", "hf", parts, tied)
        records = merge_shared_files(parts, [merged])
        for path, record in records.items():
            held = FileContents([merged]).slices(path)
            assert head_fits(staging, path, record, held) and damaged(staging, path, held) == []


def big(rng: random.Random) -> Tensor:
    """Cut unevenly, so that the ends of byte ranges fall in the middle of sectors."""
    boxes = random_boxes(rng, (rng.randint(3, 40), 1000))
    return Tensor(
        "big",
        "BF16",
        (boxes[-1].offsets[0] + boxes[-1].sizes[0], 1000),
        tuple(
            Slice("big", "BF16", b.offsets, b.sizes, "", 0, nbytes_of("BF16", b.sizes))
            for b in boxes
        ),
    )


def one_file(tmp_path: Path, tensors: Layout) -> tuple[Path, RankManifest, FileLayout]:
    file_layout = lay_out_tensors(tensors, "model")
    values = {fqn: random_values(tensor, 5) for fqn, tensor in tensors.items()}
    (tmp_path / "model").mkdir(parents=True)
    part = RankManifest(0)
    run_all(jobs_of(random.Random(5), tensors, file_layout, values, 1)[0], tmp_path, part)
    return tmp_path / "model" / file_layout.files[0].name, part, file_layout


def grid(fqn: str, dtype: str, shape: tuple[int, int], parts: tuple[int, int]) -> Tensor:
    sizes = (shape[0] // parts[0], shape[1] // parts[1])
    boxes = [
        Box((i * sizes[0], j * sizes[1]), sizes) for i in range(parts[0]) for j in range(parts[1])
    ]
    slices = tuple(
        Slice(fqn, dtype, b.offsets, b.sizes, "", 0, nbytes_of(dtype, b.sizes)) for b in boxes
    )
    return Tensor(fqn, dtype, shape, slices)


def test_a_flipped_bit_anywhere_is_found_and_its_slice_named(tmp_path: Path) -> None:
    tensors = {"a": grid("a", "BF16", (4, 6), (2, 1)), "b": grid("b", "F32", (4, 4), (1, 2))}
    path, part, file_layout = one_file(tmp_path, tensors)
    merged = merge_tree("model", "hf", [part], {})
    held = FileContents([merged]).slices(f"model/{path.name}")
    (record,) = merge_shared_files([part], [merged]).values()
    data = path.read_bytes()
    end = len(file_layout.files[0].header)
    for index in [*range(0, end, 97), *range(end, len(data))]:
        flipped = bytearray(data)
        flipped[index] ^= 1 << (index % 8)
        path.write_bytes(flipped)
        wrong = [one.stored for one in damaged(tmp_path, f"model/{path.name}", held)]
        inside = [
            one.stored
            for one in held
            for run in runs_in_file(one.stored, one.shape)
            if run.source <= index < run.source + run.nbytes
        ]
        assert wrong == inside and len(inside) == (index >= end)
        assert head_fits(tmp_path, f"model/{path.name}", record, held) == (index >= end)
