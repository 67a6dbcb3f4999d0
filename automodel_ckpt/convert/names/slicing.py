"""Operations on described tensors: select and join rows, stack and unstack. Nothing is read, and no torch is imported.

The rows of a tensor are its first dimension. A range of rows of a slice is contiguous in the file, since slices are
row-major, so that every result is again a tensor of slices. Digests of whole slices do not hold for a part
of one: the results have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, contiguous_slices, nbytes_of


@dataclass(frozen=True, slots=True)
class RowRange:
    """*num_rows* rows of the tensor number *part*, from row *first*."""

    part: int
    first: int
    num_rows: int


def join_rows(fqn: str, parts: Sequence[Tensor], ranges: Sequence[RowRange]) -> Tensor:
    """Return the tensor *fqn* that consists of *ranges* of rows of *parts*, in that order.

    All parts have the same dtype and the same dimensions after the first.
    """
    slices = []
    num_rows = 0
    for wanted in ranges:
        shift = num_rows - wanted.first
        for stored in _rows_of(parts[wanted.part], wanted.first, wanted.num_rows):
            offsets = (stored.offsets[0] + shift, *stored.offsets[1:])
            slices.append(replace(stored, fqn=fqn, offsets=offsets))
        num_rows += wanted.num_rows
    return Tensor(fqn, parts[0].dtype, (num_rows, *parts[0].shape[1:]), tuple(slices))


def unstack(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that *tensor* stacks along its first dimension, without that dimension. All keep its name."""
    found: list[list[Slice]] = [[] for _ in range(tensor.shape[0])]
    for stored in contiguous_slices(tensor):
        num_stacked = stored.sizes[0]
        if not num_stacked:
            continue
        nbytes = stored.nbytes // num_stacked
        for number in range(num_stacked):
            one = replace(
                stored,
                offsets=stored.offsets[1:],
                sizes=stored.sizes[1:],
                start=stored.start + number * stored.row_bytes,
                nbytes=nbytes,
                strides=None if stored.strides is None else stored.strides[1:],
                digest=None,
            )
            found[stored.offsets[0] + number].append(one)
    return [Tensor(tensor.fqn, tensor.dtype, tensor.shape[1:], tuple(own)) for own in found]


def stack(fqn: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor *fqn* that stacks *tensors* of one dtype and shape along a new first dimension."""
    slices = []
    for number, tensor in enumerate(tensors):
        for stored in contiguous_slices(tensor):
            strides = None if stored.strides is None else (0, *stored.strides)
            offsets, sizes = (number, *stored.offsets), (1, *stored.sizes)
            slices.append(
                replace(stored, fqn=fqn, offsets=offsets, sizes=sizes, digest=None, strides=strides)
            )
    shape = (len(tensors), *tensors[0].shape)
    return Tensor(fqn, tensors[0].dtype, shape, tuple(slices))


def _rows_of(tensor: Tensor, first: int, num_rows: int) -> Iterator[Slice]:
    """Yield what the slices of *tensor* have of its rows ``first .. first + num_rows``, at their offsets in it."""
    for stored in contiguous_slices(tensor):
        begin = max(stored.offsets[0], first)
        end = min(stored.offsets[0] + stored.sizes[0], first + num_rows)
        if begin >= end:
            continue
        if end - begin == stored.sizes[0]:
            yield replace(stored, digest=None)
            continue
        row_bytes = nbytes_of(tensor.dtype, stored.sizes[1:])
        yield replace(
            stored,
            offsets=(begin, *stored.offsets[1:]),
            sizes=(end - begin, *stored.sizes[1:]),
            start=stored.start + (begin - stored.offsets[0]) * stored.row_bytes,
            nbytes=(end - begin) * row_bytes,
            digest=None,
        )
