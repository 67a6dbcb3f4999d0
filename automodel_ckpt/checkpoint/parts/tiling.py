"""Whether slices tile a tensor: they contain each of its elements exactly once. Pure functions; imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, whole_box

# _corners() visits 2**n corners of each box that is partitioned in n dimensions.
MAX_CUT_DIMENSIONS = 5
MAX_EXTENTS = 2**59
"""The largest product of a shape's dimensions, zeros not counted: 2**63 bytes at 16 bytes an element."""


def shape_fault(shape: Sequence[int]) -> str | None:
    """Return why no program can have a tensor with this shape; None if one can.

    Strides are computed from the dimensions even where one of them is 0, so that an empty tensor can overflow too.
    """
    if math.prod(max(extent, 1) for extent in shape) > MAX_EXTENTS:
        return f"the dimensions {list(shape)} are larger than any tensor can have"
    return None


def tiling_fault(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Return why the boxes do not tile a tensor; None if they do.

    Checks the number of dimensions and the bounds of every box, that no two boxes share an element, and that they
    contain all elements. Any number of empty boxes, or none, tile an empty tensor; exactly one tiles a scalar.
    """
    if fault := shape_fault(shape):
        return fault
    if len(boxes) == 1 and boxes[0] == whole_box(shape) and min(shape, default=0) >= 0:
        return None
    for box in boxes:
        if fault := _bounds_fault(box, shape):
            return fault
    filled = [box for box in boxes if box.numel]
    have = sum(box.numel for box in filled)
    want = math.prod(shape)
    if not filled and not want:
        return None
    if have < want:
        return f"{want - have} of {want} elements are not in any slice"
    # Only the dimensions that a slice partitions: each further one would double the corners.
    cut: list[int] = []
    for dim, extent in enumerate(shape):
        if any(box.sizes[dim] != extent for box in filled):
            cut.append(dim)
    if len(cut) > MAX_CUT_DIMENSIONS:
        return f"its slices partition {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}"
    # The number of elements alone proves nothing: a gap and an overlap can cancel.
    if _corners(filled, cut) == _corners([whole_box(shape)], cut):
        return None
    return "two slices overlap"


def _bounds_fault(box: Box, shape: tuple[int, ...]) -> str | None:
    """Return why a box is not within a tensor's shape; None if it is."""
    if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
        return f"a slice has {len(box.sizes)} dimensions, the tensor {len(shape)}"
    for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > extent:
            return f"the slice at {list(box.offsets)} of size {list(box.sizes)} exceeds the shape {list(shape)}"
    return None


def interleaving_fault(tensor: Tensor) -> str | None:
    """Return why the interleaved slices of a tensor are inconsistent; None if they are not."""
    if not isinstance(tensor.slices, tuple):
        return None
    places = {(stored.file, stored.start, stored.interleaved) for stored in tensor.slices}
    if len(places) > 1 and any(stored.interleaved for stored in tensor.slices):
        return "some of its slices are interleaved, in one place, and others are not there"
    return None


def _corners(boxes: Sequence[Box], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Count how often each corner occurs, with opposite signs for lower and upper ends of dimensions.

    The counts are the mixed difference of the number of boxes at each element. They are therefore equal for two sets of
    boxes if and only if both cover the same elements equally often.
    """
    found: dict[tuple[int, ...], int] = {}
    for box in boxes:
        ends: list[tuple[tuple[int, int], ...]] = []
        for dim in dims:
            low = box.offsets[dim]
            high = low + box.sizes[dim]
            ends.append(((low, 1), (high, -1)))
        for corner in itertools.product(*ends):
            at = tuple(position for position, _ in corner)
            sign = math.prod(sign for _, sign in corner)
            found[at] = found.get(at, 0) + sign
    return {at: count for at, count in found.items() if count}
