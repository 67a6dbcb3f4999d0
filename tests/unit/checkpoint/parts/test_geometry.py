"""The geometry of slices at its boundaries: neighbors share nothing, and boxes cover exactly what they should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    Tensor,
    contiguous_slices,
    counts,
    is_one_run,
    row_major_boxes,
    runs_in_file,
    whole_tensor,
)
from automodel_ckpt.checkpoint.parts.tiling import (
    MAX_CUT_DIMENSIONS,
    MAX_EXTENTS,
    interleaving_fault,
    shape_fault,
    tiling_fault,
)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (3, 1, 2)])
def test_any_range_of_elements_is_divided_into_boxes_that_hold_them_in_order(
    shape: tuple[int, ...],
) -> None:
    elements = np.arange(int(np.prod(shape))).reshape(shape)
    whole = Box((0,) * len(shape), shape)
    for first, last in itertools.combinations_with_replacement(range(elements.size + 1), 2):
        boxes = list(row_major_boxes(shape, first, last))
        found: list[int] = []
        for box in boxes:
            assert box.numel > 0
            assert is_one_run(box, shape)
            found += elements[box.within(whole)].reshape(-1).tolist()
        assert found == list(range(first, last))
        # At most a partial row before, one box of whole rows, and a partial row after, in each dimension.
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_shapes_and_offsets_of_other_programs_are_non_negative_64_bit_integers() -> None:
    assert counts([2, 0]) == (2, 0)
    assert counts((2**63 - 1,)) == (2**63 - 1,)
    for value in ([-1], [2**63], [True], [1.0], ["1"], "12", None, {1: 2}):
        assert counts(value) is None, value


def test_the_largest_shape_is_accepted_and_one_above_is_not() -> None:
    assert shape_fault((MAX_EXTENTS,)) is None
    assert shape_fault((MAX_EXTENTS, 0)) is None
    assert shape_fault((MAX_EXTENTS + 1,)) is not None
    assert shape_fault((MAX_EXTENTS, 0, 2)) is not None


def test_faults_of_a_tiling_name_what_is_wrong() -> None:
    left, right = Box((0, 0), (2, 2)), Box((0, 2), (2, 2))
    assert tiling_fault([left, right], (2, 4)) is None
    assert "4 of 8 elements are not in any slice" in str(tiling_fault([left], (2, 4)))
    overlapping = str(tiling_fault([left, Box((0, 1), (2, 3))], (2, 4)))
    assert overlapping == "two slices overlap"
    assert "overlap" in str(tiling_fault([left, left, right], (2, 4)))
    assert "exceeds the shape" in str(tiling_fault([left, Box((0, 2), (2, 3))], (2, 4)))
    assert "exceeds the shape" in str(tiling_fault([left, Box((0, -1), (2, 3))], (2, 4)))
    assert "exceeds the shape" in str(tiling_fault([Box((0,), (-1,))], (1,)))
    assert "1 dimensions, the tensor 2" in str(tiling_fault([Box((0,), (2,))], (2, 4)))
    # As many elements as the tensor has, but one twice and one not at all.
    assert "overlap" in str(tiling_fault([Box((0,), (2,)), Box((1,), (2,))], (4,)))
    assert tiling_fault([], (0, 3)) is None
    assert tiling_fault([Box((0, 0), (0, 3)), Box((0, 0), (0, 0))], (0, 3)) is None
    assert tiling_fault([Box((), ())], ()) is None
    assert tiling_fault([], ()) is not None
    assert tiling_fault([Box((), ()), Box((), ())], ()) is not None


def test_slices_may_partition_a_limited_number_of_dimensions() -> None:
    for num_cut, is_allowed in ((MAX_CUT_DIMENSIONS, True), (MAX_CUT_DIMENSIONS + 1, False)):
        corners = itertools.product((0, 1), repeat=num_cut)
        boxes = [Box(corner, (1,) * num_cut) for corner in corners]
        fault = tiling_fault(boxes, (2,) * num_cut)
        assert (fault is None) is is_allowed
        assert is_allowed or "more than" in str(fault)


def interleaved(offsets: tuple[int, int], sizes: tuple[int, int], start: int = 100) -> Slice:
    return Slice("x", "F32", offsets, sizes, "f", start, 4 * sizes[0] * sizes[1], interleaved=True)


def test_interleaved_slices_are_at_their_positions_in_the_whole_tensor() -> None:
    left, right = interleaved((0, 0), (2, 1)), interleaved((0, 1), (2, 3))
    tensor = Tensor("x", "F32", (2, 4), (left, right))
    assert [(run.source, run.target, run.nbytes) for run in runs_in_file(left, (2, 4))] == [
        (100, 0, 4),
        (116, 4, 4),
    ]
    assert interleaving_fault(tensor) is None
    (whole,) = contiguous_slices(tensor)
    assert (whole.start, whole.nbytes, whole.sizes, whole.interleaved) == (100, 32, (2, 4), False)
    elsewhere = Tensor("x", "F32", (2, 4), (left, interleaved((0, 1), (2, 3), start=132)))
    assert "interleaved" in str(interleaving_fault(elsewhere))
    plain = whole_tensor("x", "F32", (2, 4), "f", 8)
    assert interleaving_fault(plain) is None and contiguous_slices(plain) is plain.slices
    two_places = Tensor("x", "F32", (2, 4), (plain.slices[0], plain.slices[0]))
    assert interleaving_fault(two_places) is None
    (run,) = runs_in_file(plain.slices[0], (2, 4))
    assert (run.source, run.target, run.nbytes) == (8, 0, 32)
