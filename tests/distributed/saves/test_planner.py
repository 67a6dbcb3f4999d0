"""Thousands of random layouts through the planner and back, without processes: torch's fake process group lets one
process be each rank of a grid in turn."""

import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.formats.planning import Share, TreeDescription, TreePlan
from automodel_ckpt.checkpoint.formats.rank_files import (
    ShardFiles,
    item_jobs,
    lay_out_items,
    lay_out_shards,
    metadata_of,
    shard_jobs,
)
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.jobs import jobs
from automodel_ckpt.checkpoint.jobs.jobs import (
    RankManifest,
    finalize,
    merge_tree,
    read_rank_manifests,
    run_all,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree, tiling_fault
from automodel_ckpt.checkpoint.parts.slices import RegularSlices
from automodel_ckpt.checkpoint.parts.verify import verify, verify_deep
from tests.support import ranks
from tests.support.dcp_metadata import metadata_by_torch
from tests.unit.checkpoint.parts.test_manifest import example

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
    what the inner one left. Three uneven cuts of one dimension are an error of the save."""
    mesh = chance.choice(MESHES)
    drawn: list[int | None] = [chance.choice([None, *range(num_dims)]) for _ in mesh]
    dims = [dim if drawn[:index].count(dim) < 2 else None for index, dim in enumerate(drawn)]
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


def save_all(made: list[Case], directory: Path) -> Path:
    """Plan as each rank, divide the work, write what each would write, and publish it as rank 0 would.

    The cases with even numbers are a module, the others an optimizer; each has a table.
    """
    files = ShardFiles()
    trees: dict[int, list[TreePlan]] = {}
    for rank, meshes in as_each_rank():
        states: list[dict[str, Any]] = [{}, {}]
        for case in made:
            if case.saved.mesh in meshes:
                whole = part_of(case.whole, case.saved, meshes[case.saved.mesh])
                states[case.number % 2][case.name] = whole
        trees[rank] = [
            TreePlan("model", "model", states[0], nested=False),
            TreePlan("optimizer", "optim", states[1], nested=True),
        ]
        described[rank] = [tree.describe() for tree in trees[rank]]
    staging = commit.reserve(directory, "epoch_0_step_20")
    for tree in trees[0]:
        (staging / tree.directory).mkdir()
    for rank, of_rank in trees.items():
        written = RankManifest(rank)
        for number, tree in enumerate(of_rank):
            tree.assign(shares_of(number))
            if number == 0:
                tree.layout = lay_out_shards(tree, files)
                my_jobs = list(shard_jobs(tree, rank, files))
            else:
                tree.layout = lay_out_items(tree)
                my_jobs = list(item_jobs(tree, rank))
            written.trees[tree.name] = tree.layout.rank_tree()
            run_all(my_jobs, staging, written)
        (staging / layout.rank_manifest_file(rank)).write_bytes(written.to_bytes())
    planned = {
        "model": Tree("safetensors", trees[0][0].layout.tensors, {}),
        "optimizer": Tree("torch_save", trees[0][1].layout.tensors, {}),
    }
    partial_manifest = replace(example(), state={}, trees=planned, files={})
    jobs.MIN_TABLE_ROWS = 0
    written_by_all = read_rank_manifests(staging, WORLD)
    merged = merge_tree("optimizer", planned["optimizer"], written_by_all)
    plan = trees[0][1]
    assert pickle.loads(metadata_of(plan, merged)) == metadata_by_torch(merged, dict(plan.paths))
    finalize(staging, partial_manifest, written_by_all)
    return commit.publish(staging, "epoch_0_step_20")


described: dict[int, list[TreeDescription]] = {}


def shares_of(number: int) -> list[Share]:
    """What the ranks would have exchanged about a tree."""
    by_digest: dict[str, list[int]] = {}
    for rank, descriptions in described.items():
        by_digest.setdefault(descriptions[number].digest(), []).append(rank)
    shares = []
    for equal in by_digest.values():
        origins = [described[rank][number].origins for rank in equal]
        shares.append(Share(described[equal[0]][number], equal, origins))
    return shares


def load_all(made: list[Case], manifest: Manifest, directory: Path) -> list[str]:
    wrong = []
    for rank, meshes in as_each_rank():
        for case in made:
            if case.loaded.mesh not in meshes:
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
            tree = manifest.trees[("model", "optimizer")[case.number % 2]]
            read_tree(directory, tree, state)
            if not torch.equal(state[case.name].to_local(), expected.to_local()):
                wrong.append(
                    f"rank {rank}: {case.saved} -> {case.loaded} of {list(case.whole.shape)}"
                )
    return wrong


def there_and_back(directory: Path) -> tuple[list[str], list[str], int, list[str]]:
    made = cases()
    checkpoint = save_all(made, directory)
    manifest = Manifest.read(checkpoint)
    torn = []
    num_regular = 0
    for tree in manifest.trees.values():
        for tensor in tree.tensors.values():
            num_regular += isinstance(tensor.slices, RegularSlices)
            boxes = [piece.box for piece in tensor.slices]
            assert len(boxes) == len(tensor.slices)
            if fault := tiling_fault(boxes, tensor.shape):
                torn.append(f"{tensor.fqn} of {list(tensor.shape)}: {fault}")
    problems = verify(checkpoint, manifest) + verify_deep(checkpoint, manifest)
    wrong = load_all(made, manifest, checkpoint)
    return torn, wrong, num_regular, [str(problem) for problem in problems]


def test_what_random_layouts_save_tiles_each_tensor_and_loads_into_any_other_layout(
    tmp_path: Path,
) -> None:
    ((torn, wrong, num_regular, problems),) = ranks.run(
        there_and_back, 1, tmp_path, init=False, timeout=max(170, NUM_LAYOUTS // 3)
    )
    assert torn == []
    assert wrong == []
    assert problems == []
    assert num_regular == NUM_LAYOUTS
