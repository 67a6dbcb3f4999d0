"""The places of parameters in the flat partitions of DeepSpeed's ZeRO. Imports no torch.

The optimizer keeps the float32 weights of a group of parameters, and each of its moments, as one flat vector that the
ranks share (source: deepspeed/runtime/zero, 0.19). Both have the same layout, so that the functions here describe
either: their argument *partitions* has the segments to use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.parts.tiling import tiling_fault
from automodel_ckpt.checkpoint.sources.source import unusable
from automodel_ckpt.convert.formats.deepspeed.deepspeed_files import Partition, Shape
from automodel_ckpt.convert.formats.torch.flat_vector import FlatVector


class ParameterSet:
    """The tensors that were described so far, by name. *path* is the file to name in errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Tensor] = {}

    def add(self, tensor: Tensor) -> None:
        """Add a tensor. Raises :class:`CheckpointUnusable` if its name is taken or its slices do not tile it."""
        if tensor.fqn in self.tensors:
            what = f"the parameter {tensor.fqn!r} is stored twice"
            raise unusable(what, self.path, list(tensor.shape))
        fault = tiling_fault([stored.box for stored in tensor.slices], tensor.shape)
        if fault:
            what = f"the slices of {tensor.fqn!r} do not make it up: {fault}"
            raise unusable(what, self.path, list(tensor.shape))
        self.tensors[tensor.fqn] = tensor


def add_parameters(
    found: ParameterSet, groups: list[dict[str, Shape]], partitions: Mapping[int, Partition]
) -> None:
    """Add the parameters of *groups*, whose values are in the segments of *partitions*, by the stage of ZeRO.

    Raises :class:`CheckpointUnusable` if the segments do not have the sizes of the parameters.
    """
    if partitions[0].stage == 3:
        _add_divided(found, groups, partitions)
    else:
        _add_concatenated(found, groups, partitions)


def _add_concatenated(
    found: ParameterSet, groups: list[dict[str, Shape]], partitions: Mapping[int, Partition]
) -> None:
    """Add the parameters of ZeRO stages 1 and 2: each rank has a range of a group's concatenated parameters."""
    first = partitions[0]
    if len(groups) != len(first.segments):
        what = f"the model has {len(groups)} groups of parameters, the optimizer another number"
        raise unusable(what, first.file.path, len(first.segments))
    for index, shapes in enumerate(groups):
        vector = FlatVector([partitions[rank].segments[index] for rank in sorted(partitions)])
        paddings = _group_paddings(first, index, len(shapes))
        begins: dict[str, int] = {}
        position = 0
        for (fqn, shape), padding in zip(shapes.items(), paddings, strict=True):
            begins[fqn] = position
            position += math.prod(shape) + padding
        # The vector is padded to twice the number of ranks, and that padding is stored only in part
        # (source: deepspeed/utils/zero_to_fp32.py, 0.19).
        unit = 2 * len(partitions)
        is_complete = vector.num_elements >= position
        if not is_complete or _aligned(vector.num_elements, unit) != _aligned(position, unit):
            what = f"the ranks' parts of group {index} do not have the size of its parameters"
            value = f"{vector.num_elements} elements, not {position}"
            raise unusable(what, first.file.path.parent, value)
        _check_addresses(index, shapes, partitions)
        for fqn, shape in shapes.items():
            add_from(found, fqn, shape, {0: vector}, begins[fqn], math.prod(shape))


def _group_paddings(partition: Partition, index: int, num_parameters: int) -> tuple[int, ...]:
    if partition.paddings is None:
        return (0,) * num_parameters
    found = partition.paddings[index] if index < len(partition.paddings) else ()
    if len(found) != num_parameters:
        what = f"group {index} has {num_parameters} parameters, and another number of paddings"
        raise unusable(what, partition.file.path, len(found))
    return found


def _aligned(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _check_addresses(
    index: int, shapes: Mapping[str, Shape], partitions: Mapping[int, Partition]
) -> None:
    """Check that the ranks' files, in this order, contain each parameter without a gap, as far as they state it.

    This finds most files under the name of another rank, whose sizes are the same. Only the ranges of one parameter
    are compared: with ``round_robin_gradients``, DeepSpeed states places in another order of the parameters than the
    one that it stores, which is that of ``param_shapes``.
    """
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    rank_begin = 0
    for rank in sorted(partitions):
        partition = partitions[rank]
        addresses = partition.addresses[index] if index < len(partition.addresses) else {}
        for fqn, (num_elements, start) in addresses.items():
            begin = rank_begin + start
            if fqn not in shapes:
                what = "a rank's file has a parameter that the model's states do not have"
                raise unusable(what, partition.file.path, repr(fqn)[:200])
            if ends.setdefault(fqn, begin) != begin:
                what = f"the part of {fqn!r} does not continue that of the rank before"
                value = f"element {begin} of group {index}, not {ends[fqn]}"
                raise unusable(what, partition.file.path, value)
            begins.setdefault(fqn, begin)
            ends[fqn] = begin + num_elements
        rank_begin += partition.segments[index].num_elements
    for fqn, end in ends.items():
        if end - begins[fqn] != math.prod(shapes[fqn]):
            what = f"the ranks do not have all of {fqn!r}"
            value = f"{end - begins[fqn]} elements, not {math.prod(shapes[fqn])}"
            raise unusable(what, partitions[0].file.path.parent, value)


def _add_divided(
    found: ParameterSet, groups: list[dict[str, Shape]], partitions: Mapping[int, Partition]
) -> None:
    """Add the parameters of ZeRO stage 3: each rank has a part of every parameter, all of the same size."""
    num_ranks = len(partitions)
    vectors = {rank: FlatVector(partition.segments) for rank, partition in partitions.items()}
    position = 0
    begins: dict[str, tuple[Shape, int]] = {}
    for shapes in groups:
        for fqn, shape in shapes.items():
            if fqn in begins:
                raise unusable(f"the parameter {fqn!r} is in two groups", found.path, shape)
            begins[fqn] = (shape, position)
            position += -(-math.prod(shape) // num_ranks)
    for rank, vector in vectors.items():
        if vector.num_elements != position:
            what = "a rank's part does not have the size of its share of the parameters"
            value = f"{vector.num_elements} elements, not {position}"
            raise unusable(what, partitions[rank].file.path, value)
    for fqn, (shape, begin) in begins.items():
        share = -(-math.prod(shape) // num_ranks)
        add_from(found, fqn, shape, vectors, begin, share)


def add_from(
    found: ParameterSet,
    fqn: str,
    shape: Shape,
    vectors: Mapping[int, FlatVector],
    position: int,
    share: int,
) -> None:
    """Add a parameter that is divided among *vectors*, *share* elements in each, from *position* on.

    The end of the last parts is padding.
    """
    num_elements = math.prod(shape)
    slices: list[Slice] = []
    for rank in sorted(vectors):
        first = min(rank * share, num_elements)
        last = min(first + share, num_elements)
        if first < last:
            slices.extend(vectors[rank].slices(fqn, shape, range(first, last), position))
    dtype = vectors[min(vectors)].dtype
    found.add(Tensor(fqn, dtype, shape, tuple(slices)))
