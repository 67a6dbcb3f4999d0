"""Describe the tensors of this rank without their slices, so that ranks with equal descriptions need not exchange them.

A DTensor's slices on all ranks follow from its mesh, placements and shape. Meshes with ranks in another order than
torch's own have no such formula, and are rejected. The description contains no number of a rank: those that differ
between ranks, the first ranks of the meshes, are separate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Texts, Values
from automodel_ckpt.checkpoint.parts.sharding import smallest_split
from automodel_ckpt.checkpoint.parts.slices import Box
from automodel_ckpt.errors import SaveFailed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in TORCH_NAMES.items()}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

Split = tuple[tuple[int, tuple[int, ...]], ...]
"""For each partitioned dimension of a tensor, the mesh dimensions that partition it (``sharding.Sharding``)."""


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether *value* is a ``DTensor``."""
    # There is none where its module is not imported yet, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


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
        if not isinstance(value, Tensor):
            values.append(fqn)
        elif not is_sharded(value):
            tensors[fqn] = Described(DTYPE_CODES[value.dtype], tuple(value.shape), None, ())
        elif value.device_mesh.get_coordinate() is not None:
            tensors[fqn] = meshes.describe(fqn, value)
    return TreeDescription(tensors, tuple(values), paths, kinds, meshes.origins)


def unstorable_placement(tensor: Tensor) -> str:
    """The placement of a DTensor that is neither sharded nor replicated (partial sums); empty if there is none."""
    if not is_sharded(tensor):
        return ""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    for placement in tensor.placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            return repr(placement)
    return ""


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


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    # Not to_local(), which makes a node for autograd: that takes longer than writing a small tensor.
    return tensor._local_tensor if is_sharded(tensor) else tensor


def local_box(value: Tensor) -> Box | None:
    """The box of a tensor that this rank has; None for a DTensor on a mesh without this rank."""
    if not is_sharded(value):
        return Box((0,) * value.dim(), tuple(value.shape))
    if value.device_mesh.get_coordinate() is None:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return Box(tuple(offsets), tuple(sizes))
