"""The plan of a tree on one rank: which of its slices and values this rank writes.

Each rank describes its tensors without their slices, so that ranks with equal descriptions need not exchange them: a
DTensor's slices on all ranks follow from its mesh, placements and shape. Meshes with ranks in another order than
torch's own have no such formula, and are rejected. The description contains no number of a rank: those that differ
between ranks, the first ranks of the meshes, are separate. All ranks compute the same assignment from the descriptions.
Where several ranks have the same slice, one of them writes it. Slices are distributed so that the ranks write about the
same number of bytes. The work grows with the number of tensors, not with the number of slices.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from automodel_ckpt.checkpoint.export.plan import OutputFile
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.files.type_aliases import Shape, TextDict, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.jobs.jobs import Blocks, Chunk, FileJob, RankTree
from automodel_ckpt.checkpoint.parts.slice_table import PLEASE_REPORT
from automodel_ckpt.checkpoint.parts.slices import (
    RegularSlices,
    Sharding,
    Tensor,
    TensorMap,
    nbytes_of,
    smallest_split,
)
from automodel_ckpt.checkpoint.parts.tree import Blob
from automodel_ckpt.checkpoint.state.storable import (
    DTYPE_CODES,
    blocks_of,
    flat_bytes,
    is_sharded,
    local_box,
    local_tensor,
    raw_bytes,
    saved,
)
from automodel_ckpt.errors import SaveFailed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Split = tuple[tuple[int, tuple[int, ...]], ...]
"""For each partitioned dimension of a tensor, the mesh dimensions that partition it (``sharding.Sharding``)."""


class Mesh(NamedTuple):
    """A device mesh without its first rank: its sizes, and the distance of neighbors in each dimension."""

    sizes: Shape
    strides: Shape


class Described(NamedTuple):
    """A tensor: a safetensors dtype, the global shape, its mesh and how that partitions it.

    *mesh* is None for a tensor that each rank has as a whole.
    """

    dtype: str
    shape: Shape
    mesh: Mesh | None
    split: Split


@dataclass(frozen=True, slots=True)
class TreeDescription:
    """A rank's tensors, and names of values.

    *paths* are the keys of each name in the nested state dict, *kinds* the kinds of the tensors that do not train.
    *origins* has the first rank of each mesh, and is the only part that depends on the rank.
    """

    tensors: Mapping[str, Described]
    values: tuple[str, ...]
    paths: Mapping[str, tuple[Any, ...]]
    kinds: Texts
    origins: Mapping[Mesh, int]

    def digest(self) -> str:
        """The digest of everything except the origins."""
        # Not pickle: equal values can have different pickles, by the identity of the objects in
        # them.
        content = [self.tensors, self.values, list(self.paths.items()), self.kinds]
        return digest_of(json.dumps(content, separators=(",", ":")).encode())


def describe(
    state: Values,
    paths: Mapping[str, tuple[Any, ...]],
    kinds: Texts,
) -> TreeDescription:
    """Describe a flat state dict of tensors that can be stored. Those on a mesh without this rank are left out.

    Raises :class:`SaveFailed` for a mesh with its ranks in another order than torch's own.
    """
    tensors = {}
    values = []
    meshes = _Meshes()
    for fqn, value in state.items():
        if not isinstance(value, torch.Tensor):
            values.append(fqn)
        elif not is_sharded(value):
            tensors[fqn] = Described(DTYPE_CODES[value.dtype], tuple(value.shape), None, ())
        elif value.device_mesh.get_coordinate() is not None:
            tensors[fqn] = meshes.describe(fqn, value)
    return TreeDescription(tensors, tuple(values), paths, kinds, meshes.origins)


class _Meshes:
    """The meshes of a rank's tensors. Parameters and their optimizer state have the same: each is analyzed once."""

    def __init__(self) -> None:
        self.origins: dict[Mesh, int] = {}
        self._known: dict[tuple[Any, ...], tuple[Mesh, Split]] = {}

    def describe(self, fqn: str, tensor: DTensor) -> Described:
        """Describe the tensor *fqn*."""
        shape = tuple(tensor.shape)
        key = (id(tensor.device_mesh), tensor.placements, shape)
        if key not in self._known:
            ranks = tensor.device_mesh.mesh.numpy()
            mesh, first = _mesh_of(ranks), int(ranks.flat[0])
            split = None if mesh is None else _verified_split(tensor, mesh)
            # With two meshes of one form on this rank, the origins would name only one of them.
            if mesh is None or split is None or self.origins.setdefault(mesh, first) != first:
                raise SaveFailed(
                    "a tensor is divided among the ranks of a mesh in an order that a checkpoint cannot store",
                    where=fqn,
                    value=f"{tensor.device_mesh}, {tensor.placements}",
                    hint="create the mesh with init_device_mesh",
                )
            self._known[key] = mesh, split
        return Described(DTYPE_CODES[tensor.dtype], shape, *self._known[key])


def _mesh_of(ranks: Any) -> Mesh | None:
    """The sizes and strides of a mesh; None where its ranks have irregular numbers."""
    first = ranks.flat[0]
    strides = [
        int(np.take(ranks, min(1, size - 1), axis=dim).flat[0] - first)
        for dim, size in enumerate(ranks.shape)
    ]
    expected = first
    for index, stride in zip(np.indices(ranks.shape, sparse=True), strides, strict=True):
        expected = expected + index * stride
    if min(strides, default=0) < 0 or not np.array_equal(ranks, expected):
        return None
    return Mesh(tuple(map(int, ranks.shape)), tuple(strides))


def _verified_split(tensor: DTensor, mesh: Mesh) -> Split | None:
    """The split of a tensor; None where it gives another box for this rank than PyTorch does."""
    shape = tuple(tensor.shape)
    if 0 in shape:
        return ()  # One rank stores an empty tensor.
    split = _split_of(tensor.placements)
    sharding, _ = smallest_split(*mesh, split)
    if sharding.fault() is not None:
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    used = sorted(mesh_dim for _, mesh_dims in split for mesh_dim in mesh_dims)
    box = sharding.box(shape, tuple(coordinate[mesh_dim] for mesh_dim in used))
    expected = local_box(tensor)
    assert expected is not None
    are_empty = expected.numel == box.numel == 0
    return split if are_empty or box == expected else None


def _split_of(placements: Iterable[Placement]) -> Split:
    """The mesh dimensions that partition each dimension of a tensor, the outermost first."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    split: dict[int, list[int]] = {}
    strided = set()
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            strided.add(placement.dim)
        if isinstance(placement, Shard | _StridedShard):
            split.setdefault(placement.dim, []).append(mesh_dim)
    for dim in strided:
        # It divides what the mesh dimensions after it leave: FSDP after tensor parallelism.
        split[dim].reverse()
    return tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(split.items()))


# ---------------------------------------------------------------- assignment


_Family = tuple[tuple[int, ...], Mesh | None, Any]
"""Tensors with the same replicas: numbers of the shares that have them, their mesh, and how it partitions them."""


@dataclass(frozen=True, slots=True)
class Share:
    """What some *ranks* with the same *description* have of a tree.

    *origins* has, for each of the ranks, the first rank of each of its device meshes.
    """

    description: TreeDescription
    ranks: Sequence[int]
    origins: Sequence[Mapping[Mesh, int]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """All tensors of a tree, with the slices of all ranks (without files), and the rank that writes each of its values.

    *paths* and *kinds* are from all descriptions.
    """

    tensors: TensorMap = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    kinds: Texts = field(default_factory=dict)


def assign(name: str, shares: Sequence[Share]) -> Assignment:
    """Assign the slices of the tree *name*. Raises :class:`SaveFailed` where the shares do not match."""
    families: dict[_Family, list[str]] = {}
    described = {}
    values: dict[str, int] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    kinds: TextDict = {}
    for number, share in enumerate(shares):
        paths |= share.description.paths
        kinds |= share.description.kinds
        for fqn, tensor in share.description.tensors.items():
            if fqn not in described:
                described[fqn] = tensor
                family = _family_of(name, shares, fqn, number)
                families.setdefault(family, []).append(fqn)
        for fqn in share.description.values:
            # Writing one takes microseconds: they are not distributed.
            values.setdefault(fqn, share.ranks[0])
    for fqn, rank in values.items():
        if fqn in described:
            others = (each.ranks[0] for each in shares if fqn in each.description.tensors)
            raise _mismatch(name, fqn, "a tensor", next(others), "another value", rank)
    writers = {}
    for family, names in families.items():
        # Once for all tensors of a family, because this visits all ranks.
        sharding, replicas = _replicas(name, shares, *family)
        for fqn, first in _balanced(names, described, sharding, replicas, kinds):
            writers[fqn] = sharding, first
    tensors = {}
    for fqn, tensor in described.items():
        slices = RegularSlices(fqn, tensor.dtype, tensor.shape, *writers[fqn])
        tensors[fqn] = Tensor(fqn, tensor.dtype, tensor.shape, slices)
    return Assignment(tensors, values, paths, kinds)


def _family_of(tree: str, shares: Sequence[Share], fqn: str, first: int) -> _Family:
    """The family of a tensor, which the share *first* has, and none before it."""
    tensor = shares[first].description.tensors[fqn]
    numbers = [first]
    for number in range(first + 1, len(shares)):
        other = shares[number].description.tensors.get(fqn)
        if other is None:
            continue
        if other[:2] != tensor[:2]:
            texts = [f"{each.dtype} {list(each.shape)}" for each in (tensor, other)]
            ranks = shares[first].ranks[0], shares[number].ranks[0]
            raise _mismatch(tree, fqn, texts[0], ranks[0], texts[1], ranks[1])
        # Another sharding of the same tensor is a further copy of it, which is not used.
        if other == tensor:
            numbers.append(number)
    return tuple(numbers), tensor.mesh, tensor.split


def _replicas(
    tree: str, shares: Sequence[Share], numbers: tuple[int, ...], mesh: Mesh | None, split: Any
) -> tuple[Sharding, list[int]]:
    """The sharding of a family's tensors, and the first rank of each of their replicas."""
    having = [shares[number] for number in numbers]
    if mesh is None:
        return Sharding(), sorted(rank for share in having for rank in share.ranks)
    members: Counter[int] = Counter()
    for share in having:
        members.update(origins[mesh] for origins in share.origins)
    sharding, offsets = smallest_split(mesh.sizes, mesh.strides, split)
    firsts = []
    for origin, num_ranks in sorted(members.items()):
        # Some of its ranks may have another sharding, or lack the tensor.
        if num_ranks == math.prod(mesh.sizes):
            firsts += [origin + offset for offset in offsets]
    if not firsts:
        raise SaveFailed(
            "some ranks of a device mesh do not have a tensor that the others have",
            where=tree,
            value=f"mesh {list(mesh.sizes)}, first rank {min(members)}",
            hint=PLEASE_REPORT,
        )
    return sharding, firsts


def _mismatch(
    tree: str, fqn: str, one: str, its_rank: int, other: str, other_rank: int
) -> SaveFailed:
    return SaveFailed(
        "the state of a name differs in kind, shape or dtype between ranks",
        where=f"{tree}: {fqn}",
        value=f"{one} on rank {its_rank}, {other} on rank {other_rank}",
        hint="state that differs between ranks needs different names",
    )


def _balanced(
    names: Sequence[str],
    described: Mapping[str, Described],
    sharding: Sharding,
    replicas: Sequence[int],
    kinds: Texts,
) -> Iterable[tuple[str, int]]:
    """Yield each tensor with the first rank of the replica that writes it: the largest tensors first, each to the
    replica with the fewest bytes.

    The first replica writes all buffers. Ranks may have different ones: the buffers of batch normalization are computed
    from the rank's own samples, until DDP broadcasts its first rank's buffers with the next forward pass.
    """
    if len(replicas) == 1:
        yield from ((fqn, replicas[0]) for fqn in names)
        return
    nbytes = {}
    origin = (0,) * len(sharding.mesh)
    for fqn in names:
        tensor = described[fqn]
        nbytes[fqn] = nbytes_of(tensor.dtype, sharding.box(tensor.shape, origin).sizes)
    # All ranks must compute the same: no order of a set may count.
    buffers = {fqn: replicas[0] for fqn in names if kinds.get(fqn) == layout.BUFFERS}
    yield from buffers.items()
    loads = [(0, number) for number in range(len(replicas))]
    heapq.heapreplace(loads, (sum(nbytes[fqn] for fqn in buffers), 0))
    others = [fqn for fqn in names if fqn not in buffers]
    for fqn in sorted(others, key=lambda name: -nbytes[name]):
        load, number = loads[0]
        yield fqn, replicas[number]
        # At least one byte: many tiny tensors are distributed, too.
        heapq.heapreplace(loads, (load + max(nbytes[fqn], 1), number))


# ---------------------------------------------------------------- plan of a tree


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The regular tensors of a tree and their copies, by name. Those in a part have the order of a rank's file.

    In Hugging Face files, which all ranks write together, they have positions in *files*. *copies_of* has the names of
    a tensor's copies, by its FQN.
    """

    tensors: TensorMap = field(default_factory=dict)
    copies: TensorMap = field(default_factory=dict)
    files: tuple[OutputFile, ...] = ()
    copies_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Iterator[Tensor]:
        """Yield what *rank* writes of the tensors, in their order: each with one slice, which has no file yet.

        Empty slices of tensors that are not empty are omitted.
        """
        for tensor in self.tensors.values():
            assert isinstance(tensor.slices, RegularSlices)
            stored = tensor.slices.of_rank(rank)
            if stored is not None:
                yield Tensor(tensor.fqn, tensor.dtype, tensor.shape, (stored,))

    def rank_tree(self) -> RankTree:
        """An empty record of what this rank writes of the tree."""
        rows = {}
        placed = False
        for number, tensor in enumerate((*self.tensors.values(), *self.copies.values())):
            assert isinstance(tensor.slices, RegularSlices)
            rows[tensor.fqn] = tensor.slices.part, number
            placed = placed or tensor.slices.position is not None
        return RankTree(rows=rows, placed=placed)


def ordered(tensors: Iterable[Tensor], part_of: Callable[[str], int] = lambda fqn: 0) -> TreeLayout:
    """The layout of regular *tensors* in files of the ranks, in this order; *part_of* is the part of a name."""
    found = {}
    for tensor in tensors:
        assert isinstance(tensor.slices, RegularSlices)
        part = part_of(tensor.fqn)
        if part != tensor.slices.part:
            tensor = replace(tensor, slices=replace(tensor.slices, part=part))
        found[tensor.fqn] = tensor
    return TreeLayout(found)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Tensor data that is fetched only when it is needed."""

    tensor: Callable[[], torch.Tensor]
    nbytes: int

    def __call__(self) -> memoryview | Blocks:
        """The row-major bytes; of a tensor on a GPU as blocks, which are copied while they are written."""
        tensor = self.tensor()
        if tensor.is_cuda:
            return Blocks(self.nbytes, partial(blocks_of, flat_bytes(tensor)))
        return raw_bytes(tensor)


@dataclass(slots=True)
class TreePlan:
    """The state dict of one tree, and which rank writes what of it. *kinds* has the kinds of tensors that do not train.

    The results of :meth:`describe` are compared between ranks (``saving/planner.py``). :meth:`assign`
    takes the resulting shares. Every rank computes the same assignment, so nothing is scattered.
    """

    name: str
    directory: str
    state_dict: InitVar[ValueDict]
    nested: bool
    kinds: Texts = field(default_factory=dict)
    tied: Texts = field(default_factory=dict)
    """Each name of a module's tensor that is stored under another name, to that name."""
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    assignment: Assignment = field(default_factory=Assignment)
    format: str = ""
    """The format, by the name that the manifest gives it."""
    layout: TreeLayout = field(default_factory=TreeLayout)
    metadata: bytes = b""
    """DCP's ``.metadata``, which depends on the plan only. Rank 0 adds it when it publishes."""
    flat: Values = field(default_factory=dict)
    """The state dict in one level. A later save replaces it by one with the same names and shapes."""

    def __post_init__(self, state_dict: ValueDict) -> None:
        """Flatten *nested* state dicts (of optimizers) into one level."""
        self.flat = state_dict
        if self.nested:
            from torch.distributed.checkpoint._nested_dict import flatten_state_dict

            self.flat, self.paths = flatten_state_dict(state_dict)

    def describe(self) -> TreeDescription:
        """Describe this rank's state."""
        return describe(self.flat, self.paths, self.kinds)

    def assign(self, shares: Sequence[Share]) -> None:
        """Assign each slice, and each value that is not a tensor, to exactly one rank.

        *shares* are the shares of all ranks. Raises :class:`SaveFailed` where they do not match.
        """
        self.assignment = assign(self.name, shares)
        self.paths, self.kinds = self.assignment.paths, self.assignment.kinds

    def values(self, rank: int, file: str) -> tuple[list[Chunk], int]:
        """The chunks of the values that *rank* writes at the start of *file*, and their end. They are no tensors."""
        chunks, end = [], 0
        for fqn, writer in self.assignment.values.items():
            if writer == rank:
                data = bytes(saved(self.flat[fqn]))
                chunks.append(Chunk(end, data, Blob(fqn, file, end, len(data), "")))
                end += len(data)
        return chunks, end

    def fetch(self, tensor: Tensor) -> Fetch:
        """The data of the slice of *tensor* (of :meth:`TreeLayout.of_rank`), to be fetched when it is written."""
        (stored,) = tensor.slices
        return Fetch(partial(self._local_data, tensor.fqn, stored.sizes), stored.nbytes)

    def _local_data(self, fqn: str, sizes: Shape) -> torch.Tensor:
        """The local data of a slice of shape *sizes*, on its device, from the present state dict."""
        # Looked up at each save: a kept plan must see parameters that were replaced.
        value = self.flat[fqn]
        local = local_tensor(value)
        if local.requires_grad:
            local = local.detach()
        return local if local.shape == sizes else local.reshape(sizes)

    def release_values(self) -> None:
        """Drop the references to the state, so that what training replaces is freed. The plan stays usable."""
        self.flat = {}


def located(tensor: Tensor, file: str, start: int) -> Tensor:
    """*tensor*, which has one slice, with this slice from byte *start* of *file*."""
    (stored,) = tensor.slices
    return Tensor(
        tensor.fqn, tensor.dtype, tensor.shape, (replace(stored, file=file, start=start),)
    )


def values_job(plan: TreePlan, rank: int) -> Iterator[FileJob]:
    """The job for a module's values that are not tensors (``get_extra_state``), in a separate file."""
    file = layout.objects_file(plan.directory, rank)
    chunks, _ = plan.values(rank, file)
    if chunks:
        yield FileJob(file, chunks, plan.name)
