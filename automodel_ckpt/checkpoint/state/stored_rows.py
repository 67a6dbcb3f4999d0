"""Complete rows of a stored tensor, read without the rest of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from automodel_ckpt.checkpoint.formats.planning import DTYPES
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.checkpoint.parts.slices import Box, Slice, Tensor, intersection, nbytes_of
from automodel_ckpt.checkpoint.sources.source import Tensors


def read_rows(source: Tensors, stored: Tensor, first: int, stop: int) -> torch.Tensor:
    """Read rows ``first .. stop`` of a stored tensor, in its dtype, into host memory.

    Raises :class:`CheckpointUnusable` naming the file.
    """
    rows = rows_of(stored, first, stop)
    values = torch.empty(rows.shape, dtype=DTYPES[stored.dtype], device="cpu")
    read_tree(source.root, Tree("", {stored.fqn: rows}, {}), {stored.fqn: values})
    return values


def rows_of(tensor: Tensor, first: int, stop: int) -> Tensor:
    """Rows ``first .. stop`` of a tensor (of at least one dimension) as a separate tensor."""
    row_shape = tensor.shape[1:]
    no_offset = (0,) * len(row_shape)
    wanted = Box((first, *no_offset), (stop - first, *row_shape))
    slices: list[Slice] = []
    for stored in tensor.slices:
        rows = _rows_of_slice(stored, wanted)
        if rows is not None:
            slices.append(rows)
    return Tensor(tensor.fqn, tensor.dtype, wanted.sizes, tuple(slices))


def _rows_of_slice(stored: Slice, wanted: Box) -> Slice | None:
    """The rows of a slice in *wanted*, a range of complete rows, counted from its first row; they are contiguous."""
    common = intersection(stored.box, wanted)
    if common is None:
        return None
    row_bytes = nbytes_of(stored.dtype, stored.sizes[1:])
    start = stored.start + (common.offsets[0] - stored.offsets[0]) * stored.row_bytes
    offsets = (common.offsets[0] - wanted.offsets[0], *common.offsets[1:])
    return replace(
        stored,
        offsets=offsets,
        sizes=common.sizes,
        start=start,
        nbytes=common.sizes[0] * row_bytes,
        # The slice's digest covers all of its rows.
        digest=None,
    )
