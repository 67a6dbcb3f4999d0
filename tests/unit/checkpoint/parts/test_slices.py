"""The geometry of slices, checked against NumPy."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_ckpt.checkpoint.parts.manifest import MAX_CUT_DIMENSIONS, tiling_fault
from automodel_ckpt.checkpoint.parts.slices import Box, intersection, overlap


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))

    def box() -> Box:
        offsets = tuple(draw(st.integers(0, extent)) for extent in shape)
        sizes = tuple(
            draw(st.integers(0, extent - o)) for extent, o in zip(shape, offsets, strict=True)
        )
        return Box(offsets, sizes)

    return shape, box(), box()


def part(array: np.ndarray, box: Box) -> np.ndarray:
    index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return np.ascontiguousarray(array[index]) if index else array


@settings(max_examples=150, deadline=None)
@given(two_boxes())
def test_copying_the_runs_of_two_boxes_copies_exactly_what_they_share(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, source, target = case
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    source_bytes = part(whole, source).tobytes()
    expected = np.full(shape, -1, np.int32)
    common = intersection(source, target)
    if common is not None:
        index = tuple(slice(o, o + s) for o, s in zip(common.offsets, common.sizes, strict=True))
        expected[index] = whole[index]
    copied = bytearray(part(np.full(shape, -1, np.int32), target).tobytes())
    for run in overlap(source, target, 4):
        copied[run.target : run.target + run.nbytes] = source_bytes[
            run.source : run.source + run.nbytes
        ]
    assert bytes(copied) == part(expected, target).tobytes()


@settings(max_examples=100, deadline=None)
@given(two_boxes())
def test_two_boxes_tile_a_shape_only_if_every_element_is_in_exactly_one(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, a, b = case
    count = np.zeros(shape, np.int32)
    for box in (a, b):
        count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (tiling_fault([a, b], shape) is None) == bool((count == 1).all())


def test_slices_may_partition_a_limited_number_of_dimensions() -> None:
    for num_cut, is_allowed in ((MAX_CUT_DIMENSIONS, True), (MAX_CUT_DIMENSIONS + 1, False)):
        corners = itertools.product((0, 1), repeat=num_cut)
        boxes = [Box(corner, (1,) * num_cut) for corner in corners]
        fault = tiling_fault(boxes, (2,) * num_cut)
        assert (fault is None) is is_allowed
        assert is_allowed or "more than" in str(fault)
