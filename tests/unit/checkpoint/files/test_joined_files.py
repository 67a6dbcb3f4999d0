"""Files that the ranks of a node write together: which tensors they can contain, and where each rank writes."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.files import ownership
from automodel_ckpt.checkpoint.files.digests import OF_SEGMENTS, FileRecord, record_of_ranges
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.ownership import node_identity
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.formats.joined import joined_files, joined_slices
from automodel_ckpt.checkpoint.formats.safetensors import ShardFiles
from automodel_ckpt.checkpoint.jobs.file_groups import groups_of
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest, WrittenRange, merge_ranges
from automodel_ckpt.checkpoint.parts import merkle
from automodel_ckpt.checkpoint.parts.merkle import FileSlice
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices, Sharding
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, overlap
from automodel_ckpt.errors import SaveFailed


def sharded(shape: tuple[int, ...], sharding: Sharding, first: int = 0, name: str = "a") -> Tensor:
    slices = RegularSlices(name, "F32", shape, sharding, first)
    return Tensor(name, "F32", shape, slices)


NODE = tuple(range(4, 8))
"""The ranks of the second of four nodes."""
FSDP = Sharding((16,), (1,), ((0, (0,)),))


@pytest.mark.parametrize(
    ("shape", "sharding", "expected"),
    [
        ((64, 3), FSDP, [4]),
        ((5, 3), FSDP, [1]),
        # One rank stores it, on another node.
        ((4, 4), Sharding(), []),
        # HSDP: the shards of a replica are neighbors.
        ((64, 3), Sharding((8,), (1,), ((0, (0,)),)), [4]),
        # Tensor parallel on each node, and FSDP between the nodes: rows, or columns.
        ((64, 3), Sharding((4, 4), (4, 1), ((0, (1, 0)),)), [1] * 4),
        ((64, 8), Sharding((4, 4), (4, 1), ((0, (0,)), (1, (1,)))), [1] * 4),
        # Pairs of tensor parallel ranks: the slices of one in two ranks are joined.
        ((64, 3), Sharding((8, 2), (2, 1), ((0, (1, 0)),)), [2, 2]),
        ((64, 8), Sharding((8, 2), (2, 1), ((0, (0,)), (1, (1,)))), [2, 2]),
        # FSDP on each node, tensor parallel between them.
        ((64, 3), Sharding((4, 4), (4, 1), ((0, (0, 1)),)), [4]),
        # Columns.
        ((4, 64), Sharding((16,), (1,), ((1, (0,)),)), [1] * 4),
        ((1, 64), Sharding((16,), (1,), ((1, (0,)),)), [4]),
    ],
)
def test_slices_that_are_consecutive_are_joined(
    shape: tuple[int, ...], sharding: Sharding, expected: list[int]
) -> None:
    found = joined_slices(sharded(shape, sharding), NODE)
    assert [len(joined.ranks) for joined in found] == expected


def test_ranks_that_are_no_neighbors_have_files_of_their_own() -> None:
    tensor = sharded((8,), Sharding((4,), (1,), ((0, (0,)),)))
    whole = sharded((8,), Sharding(), first=2, name="b")
    files = joined_files([tensor, whole], (0, 2))
    assert [{name: each.ranks for name, each in file.slices.items()} for file in files] == [
        {"a": {0}, "b": {2}},
        {"a": {2}},
    ]


def random_tensor(source: random.Random, name: str, num_ranks: int) -> Tensor:
    shape = tuple(source.randint(0, 9) for _ in range(source.randint(0, 3)))
    sizes: list[int] = []
    for size in (2, 3, 4):
        if shape and 0 not in shape and num_ranks % (size * max(1, len(sizes) * 4)) == 0:
            sizes.append(size)
    dims = list(range(len(sizes)))
    strides = [1] * len(sizes)
    for index in range(len(sizes) - 2, -1, -1):
        strides[index] = strides[index + 1] * sizes[index + 1]
    if len(sizes) > 1 and source.random() < 0.5:
        sizes.reverse()
        strides.reverse()
    split: dict[int, list[int]] = {}
    for mesh_dim in source.sample(dims, len(dims)):
        split.setdefault(source.randrange(len(shape)), []).append(mesh_dim)
    ordered = tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(split.items()))
    sharding = Sharding(tuple(sizes), tuple(strides), ordered)
    assert sharding.fault() is None
    width = 1
    for size in sizes:
        width *= size
    return sharded(shape, sharding, source.randrange(num_ranks // width) * width, name)


def test_the_ranks_of_a_group_fill_its_files_without_gaps_over_1000_random_shardings(
    tmp_path: Path,
) -> None:
    source = random.Random(1)
    num_joined = 0
    for _ in range(100):
        num_ranks = source.choice([8, 12, 24])
        tensors = [random_tensor(source, f"t{number}", num_ranks) for number in range(10)]
        nodes = [str(rank * source.randint(2, 4) // num_ranks) for rank in range(num_ranks)]
        groups = groups_of(sorted(nodes), source.randint(1, 2))
        for group in groups.groups:
            num_joined += check_files(tmp_path / "file", tensors, group)
    assert num_joined > 300


def check_files(path: Path, tensors: list[Tensor], group: tuple[int, ...]) -> int:
    """Compare the files of a group with the slices of its ranks; return how many slices of several ranks they have."""
    pieces = []
    for tensor in tensors:
        assert isinstance(tensor.slices, RegularSlices)
        for rank in group:
            stored = tensor.slices.of_rank(rank)
            if stored is not None:
                pieces.append((rank, replace(tensor, slices=(stored,)), stored))
    files = joined_files(tensors, group)
    assert len(files) <= len(group)
    num_found = 0
    for file in files:
        path.write_bytes(file.header)
        os.truncate(path, file.nbytes)
        header = read_header(path)
        here = [(file.start_of(tensor, rank), tensor, stored) for rank, tensor, stored in pieces]
        found = [(start, tensor, stored) for start, tensor, stored in here if start is not None]
        num_found += len(found)
        end = len(file.header)
        for start, _, stored in sorted(found, key=lambda each: (each[0], each[2].nbytes)):
            assert start == end
            end += stored.nbytes
        assert end == file.nbytes
        for start, tensor, stored in found:
            joined, entry = file.slices[tensor.fqn], header.tensors[tensor.fqn]
            assert (entry.start, entry.shape) == (joined.start, joined.box.sizes)
            # Where a reader of the joined slice expects the bytes of this one.
            runs = list(overlap(joined.box, stored.box, DTYPE_BITS["F32"] // 8))
            if stored.nbytes:
                assert [joined.start + run.source for run in runs] == [start]
    assert num_found == len(pieces)
    slices = [each for file in files for each in file.slices.values()]
    return sum(len(each.ranks) > 1 for each in slices)


def test_a_gap_between_slices_in_a_table_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    record = FileRecord(32, f"{OF_SEGMENTS}00")
    monkeypatch.setattr(merkle, "file_digest", lambda *_: record.digest)
    slices = [Slice("a", "F32", (at,), (2,), "model/a", 8 + 4 * at, 8) for at in (0, 2, 4)]
    held = [FileSlice(stored, (6,)) for stored in slices]
    assert merkle.digest_fits((), "model/a", record, "", held)
    for missing in range(1, 3):
        some = [*held[:missing], *held[missing + 1 :]]
        assert not merkle.digest_fits((), "model/a", record, "", some)


def test_ranges_that_do_not_make_up_a_file_are_not_published() -> None:
    ranges = [WrittenRange(0, 16, "x:1"), WrittenRange(16, 0, "x:2"), WrittenRange(16, 8, "x:3")]
    manifests = [
        RankManifest(rank, ranges={"rng/a": written}) for rank, written in enumerate(ranges)
    ]
    found = merge_ranges(reversed(manifests))
    assert found == {"rng/a": record_of_ranges([(16, "x:1"), (0, "x:2"), (8, "x:3")])}
    for wrong in (manifests[1:], [manifests[0], *manifests]):
        with pytest.raises(SaveFailed, match="other parts of a file than planned"):
            merge_ranges(wrong)


def test_nodes_are_distinguished_by_all_that_is_known_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    found = {node_identity(tmp_path)}
    # The directory of a new run.
    assert node_identity(tmp_path / "runs/a") in found
    found.add(node_identity(Path("/proc")))
    monkeypatch.setenv("GROUP_RANK", "1")
    found.add(node_identity(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    found.add(node_identity(tmp_path))
    monkeypatch.setattr(ownership, "kernel_boot_id", lambda: None)
    found.add(node_identity(tmp_path))
    assert len(found) == 5


def test_the_file_of_a_tensor_does_not_depend_on_how_many_there_are() -> None:
    class Mapping(dict[str, int]):
        num_walks = 0

        def values(self) -> Any:
            self.num_walks += 1
            return super().values()

    mapping = Mapping({f"t{number}": 1 + number // 50 for number in range(100)})
    files = ShardFiles(mapping, {"t0": "frozen"})
    keys = [files.key(fqn) for fqn in (*mapping, "new")]
    assert keys[0] == (1, "frozen") and keys[99] == keys[100] == (2, "model")
    assert files.name("model", 3, keys[100]).endswith("00002-of-00002.safetensors")
    # A base of 10,000 tensors had a walk through all of them for each.
    assert mapping.num_walks == 1
