"""Flat vectors: many parameters as one array, which several ranks store in parts. Imports no torch.

DeepSpeed's ZeRO flattens the parameters of a group, concatenates them, and gives each rank a range of the elements. A
range of elements of a row-major tensor is a few boxes, each of which is contiguous in the vector, so that such a tensor
is described as slices of the ranks' files and nothing is copied.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.slices import Slice, row_major_boxes


@dataclass(frozen=True, slots=True)
class Segment:
    """*num_elements* consecutive elements of a flat vector, stored at byte *start* of *file*."""

    dtype: str
    file: str
    start: int
    num_elements: int


class FlatVector:
    """The concatenation of *segments*, which all have the same dtype (a safetensors code)."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        self._begins: list[int] = []
        num_elements = 0
        for segment in self._segments:
            self._begins.append(num_elements)
            num_elements += segment.num_elements
        self.num_elements = num_elements
        self.dtype = self._segments[0].dtype if self._segments else "F32"

    def slices(
        self, fqn: str, shape: tuple[int, ...], elements: range, position: int
    ) -> Iterator[Slice]:
        """Yield the slices of the tensor *fqn* of that shape that its row-major *elements* make up.

        The first of them is element *position* of this vector. The caller has checked that the vector contains all of
        them.
        """
        first, last = elements.start, elements.stop
        # If several segments begin at this element, all but the last are empty.
        index = bisect.bisect_right(self._begins, position) - 1
        while first < last:
            segment = self._segments[index]
            itemsize = DTYPE_BITS[segment.dtype] // 8
            skipped = position - self._begins[index]
            num_elements = min(segment.num_elements - skipped, last - first)
            start = segment.start + skipped * itemsize
            for box in row_major_boxes(shape, first, first + num_elements):
                nbytes = box.numel * itemsize
                yield Slice(fqn, segment.dtype, box.offsets, box.sizes, segment.file, start, nbytes)
                start += nbytes
            first += num_elements
            position += num_elements
            index += 1
