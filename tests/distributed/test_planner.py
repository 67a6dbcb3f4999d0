"""Thousands of random layouts through the planner and back, without processes: torch's fake process group lets one
process be each rank of a grid in turn."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel_ckpt.checkpoint.formats.planning import TreePlan, located
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.manifest import Tree
from automodel_ckpt.checkpoint.slices import Box, Tensor, tiling_fault
from tests.support import ranks

WORLD = 8
MESHES = ((1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2))
NUM_LAYOUTS = int(os.environ.get("RESHARD_LAYOUTS", "120"))  # `make reshard` tries 3000
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@dataclass(frozen=True)
class Layout:
    """A grid and, per dimension of it, what a tensor has there."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    """A tensor, the layout it is saved from and the one it is loaded into."""

    number: int
    whole: torch.Tensor
    saved: Layout
    loaded: Layout

    @property
    def name(self) -> str:
        return f"case {self.number}"


def cases() -> list[Case]:
    chance, generator = random.Random(7), torch.Generator().manual_seed(7)
    made = []
    for number in range(NUM_LAYOUTS):
        shape = [
            chance.choice((0, 1, 2, 3, 5, 7, 8, 16, 19, 37))
            for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3)))
        ]
        whole = torch.randint(-99, 99, shape, generator=generator).to(chance.choice(DTYPES))
        made.append(
            Case(number, whole, a_layout(chance, whole.dim()), a_layout(chance, whole.dim()))
        )
    return made


def a_layout(chance: random.Random, num_dims: int) -> Layout:
    """As fsdp2, tensor parallelism and both together make them: on a dimension that is cut twice, the outer cut is of
    what the inner one left."""
    mesh = chance.choice(MESHES)
    dims: list[int | None] = [chance.choice([None, *range(num_dims)]) for _ in mesh]
    placements: list[Placement] = []
    for index, dim in enumerate(dims):
        inner = 1
        for size, other in zip(mesh[index + 1 :], dims[index + 1 :], strict=True):
            inner *= size if other == dim else 1
        if dim is None:
            placements.append(Replicate())
        else:
            placements.append(Shard(dim) if inner == 1 else _StridedShard(dim, split_factor=inner))
    return Layout(mesh, tuple(placements))


def as_each_rank() -> Iterator[tuple[int, dict[tuple[int, ...], DeviceMesh]]]:
    """Be every rank in turn; the meshes that it is part of."""
    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        meshes = {}
        for shape in MESHES:
            size = torch.Size(shape).numel()
            mesh = DeviceMesh("cpu", torch.arange(size).reshape(shape))
            if rank < size:
                meshes[shape] = mesh
        yield rank, meshes
        dist.destroy_process_group()


def part_of(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """This rank's share, cut as torch cuts it: the inner dimensions of the grid first."""
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, layout.placements)
    local = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
    return DTensor.from_local(
        local, mesh, layout.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def save_all(made: list[Case], directory: Path) -> dict[str, Tensor]:
    """Plan as each rank, divide the work, and write what each would write; one file per rank."""
    trees: dict[tuple[int, int], TreePlan] = {}
    plans: dict[int, list[Any]] = {case.number: [] for case in made}
    for rank, meshes in as_each_rank():
        for case in made:
            if case.saved.mesh in meshes:
                state = {case.name: part_of(case.whole, case.saved, meshes[case.saved.mesh])}
                tree = trees[case.number, rank] = TreePlan("model", "model", state, nested=False)
                plans[case.number].append(tree.local())
    pieces: dict[str, list[Any]] = {case.name: [] for case in made}
    for rank in range(WORLD):
        with open(directory / f"rank_{rank}", "wb") as file:
            for case in made:
                tree = trees.get((case.number, rank))
                if tree is None:
                    continue
                tree.partition(plans[case.number], rank)
                for tensor in tree.tensors():
                    stored = located(tensor, f"rank_{rank}", file.tell())
                    file.write(tree.fetch(tensor)())
                    pieces[case.name].extend(stored.slices)
    return {
        case.name: Tensor(
            case.name, pieces[case.name][0].dtype, tuple(case.whole.shape), tuple(pieces[case.name])
        )
        for case in made
        if pieces[case.name] or case.whole.numel()
    }


def load_all(made: list[Case], tensors: dict[str, Tensor], directory: Path) -> list[str]:
    wrong = []
    for rank, meshes in as_each_rank():
        for case in made:
            if case.loaded.mesh not in meshes or case.name not in tensors:
                continue
            expected = part_of(case.whole, case.loaded, meshes[case.loaded.mesh])
            target = DTensor.from_local(
                torch.full_like(expected.to_local(), 1),
                expected.device_mesh,
                expected.placements,
                run_check=False,
                shape=expected.shape,
                stride=expected.stride(),
            )
            state = {case.name: target}
            read_tree(directory, Tree("safetensors", {case.name: tensors[case.name]}, {}), state)
            if not torch.equal(state[case.name].to_local(), expected.to_local()):
                wrong.append(
                    f"rank {rank}: {case.saved} -> {case.loaded} of {list(case.whole.shape)}"
                )
    return wrong


def there_and_back(directory: Path) -> tuple[list[str], list[str], int]:
    made = cases()
    tensors = save_all(made, directory)
    torn = []
    for case in made:
        if case.name in tensors:
            boxes = [Box(piece.offsets, piece.sizes) for piece in tensors[case.name].slices]
            if fault := tiling_fault(boxes, tuple(case.whole.shape)):
                torn.append(f"{case.saved} of {list(case.whole.shape)}: {fault}")
    return torn, load_all(made, tensors, directory), len(tensors)


def test_what_random_layouts_save_tiles_each_tensor_and_loads_into_any_other_layout(
    tmp_path: Path,
) -> None:
    ((torn, wrong, num_stored),) = ranks.run(
        there_and_back, 1, tmp_path, init=False, timeout=max(170, NUM_LAYOUTS // 3)
    )
    assert torn == []
    assert wrong == []
    assert num_stored > 0.9 * NUM_LAYOUTS
