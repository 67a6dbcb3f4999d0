"""The geometry of slices at its boundaries: neighbors share nothing, and boxes cover exactly what they should."""

import itertools

from automodel_ckpt.checkpoint.parts.slices import MAX_CUT_DIMENSIONS, Box, tiling_fault


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
