"""Operations on described tensors: select and join rows, stack and unstack. Nothing is read, and no torch is imported.

The rows of a tensor are its first dimension. A range of rows of a slice is contiguous in the file, since slices are
row-major, so that every result is again a tensor of slices. Digests of whole slices do not hold for a part
of one: the results have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, contiguous_slices, nbytes_of


@dataclass(frozen=True, slots=True)
class RowRange:
    """*num_rows* rows of the tensor number *part*, from row *first*."""

    part: int
    first: int
    num_rows: int


def join_rows(
    fqn: str, parts: Sequence[Tensor], ranges: Sequence[RowRange], *, strided: bool = False
) -> Tensor:
    """Return the tensor *fqn* that consists of *ranges* of rows of *parts*, in that order.

    All parts have the same dtype and the same dimensions after the first. With *strided*, rows that are equally far
    apart in one file become one slice with strides: a permutation of rows has few slices instead of one for each row.
    """
    dtype, inner = parts[0].dtype, parts[0].shape[1:]
    slices = []
    num_rows = 0
    for wanted in ranges:
        shift = num_rows - wanted.first
        for stored in _rows_of(parts[wanted.part], wanted.first, wanted.num_rows):
            offsets = (stored.offsets[0] + shift, *stored.offsets[1:])
            slices.append(replace(stored, fqn=fqn, offsets=offsets))
        num_rows += wanted.num_rows
    merged = _merged_strided(slices) if strided else slices
    return Tensor(fqn, dtype, (num_rows, *inner), tuple(merged))


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


def _merged_strided(slices: Sequence[Slice]) -> list[Slice]:
    """Return *slices*, with single rows joined that follow each other in the tensor, at one distance in the file."""
    merged: list[Slice] = []
    for stored in slices:
        joined = _joined_at_a_distance(merged[-1], stored) if merged else None
        if joined is None:
            merged.append(stored)
        else:
            merged[-1] = joined
    return merged


def _joined_at_a_distance(one: Slice, row: Slice) -> Slice | None:
    """Return the slice of the rows of *one* and the single *row* after them; None if they are no such slice."""
    follows = row.offsets == (one.offsets[0] + one.sizes[0], *one.offsets[1:])
    if not follows or row.sizes != (1, *one.sizes[1:]) or row.file != one.file or not row.nbytes:
        return None
    one_strides = _element_strides(one)
    if one_strides[1:] != _element_strides(row)[1:]:
        return None
    itemsize = DTYPE_BITS[one.dtype] // 8
    if one.sizes[0] == 1:
        # Two rows have any distance, but a slice has no negative one.
        distance, rest = divmod(row.start - one.start, itemsize)
        if distance <= 0 or rest:
            return None
    else:
        distance = one_strides[0]
        if row.start != one.start + one.sizes[0] * distance * itemsize:
            return None
    return replace(
        one,
        sizes=(one.sizes[0] + 1, *one.sizes[1:]),
        nbytes=one.nbytes + row.nbytes,
        strides=(distance, *one_strides[1:]),
    )


def _element_strides(stored: Slice) -> tuple[int, ...]:
    """Return the distances of neighbors in each dimension of a slice, in elements."""
    if stored.strides is not None:
        return stored.strides
    strides = []
    stride = 1
    for size in reversed(stored.sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
