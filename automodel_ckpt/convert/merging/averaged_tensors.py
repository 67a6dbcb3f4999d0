"""The tensors of an average, computed block by block while they are written. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.jobs.jobs import Blocks
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast, storage_dtype
from automodel_ckpt.checkpoint.tensors.integrity import require_intact
from automodel_ckpt.convert.merging.average_options import Integers


class AveragedTensors:
    """Combines the tensors of *modules*: the sum of each source's tensor times its weight, in float32 or float64."""

    def __init__(
        self, modules: Sequence[Tensors], weights: Sequence[float], integers: Integers
    ) -> None:
        self._modules = modules
        self._weights = weights
        self._integers = integers

    def blocks(self, tensor: Tensor) -> Blocks:
        """Return the data of *tensor* in the result, which is computed while it is written."""
        return Blocks(tensor.nbytes, partial(self._blocks, tensor))

    def _blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield the row-major bytes of the combined tensor. Raises :class:`CheckpointUnusable` for damaged sources."""
        sources = [_Reader(module, tensor.fqn) for module in self._modules]
        # Boxes are consecutive: each has complete inner dimensions.
        if tensor.dtype not in ORDINARY_FLOATS:
            position = -1 if self._integers == "last" else 0
            for box in boxes(tensor.shape):
                yield _bytes_of(sources[position].raw(box))
            return
        with np.errstate(over="ignore", invalid="ignore"):
            for box in boxes(tensor.shape):
                values = [source.values(box) for source in sources]
                combined = _weighted_sum(values, self._weights)
                yield _bytes_of(cast(combined, sources[0].wide_dtype, tensor.dtype))


class _Reader:
    """Reads one tensor of a module in boxes, after its stored bytes were compared with their digests."""

    def __init__(self, module: Tensors, fqn: str) -> None:
        self._tensor = module.tensors[fqn]
        require_intact(module.root, self._tensor)
        self._reader = BoxReader(module.root, self._tensor)
        self.wide_dtype = "F64" if self._tensor.dtype == "F64" else "F32"

    def raw(self, box: Box) -> Array:
        """Return the bits of the elements in *box*."""
        return self._reader.read(box)

    def values(self, box: Box) -> Array:
        """Return the elements in *box*, row-major, shape [N], in float32, or in float64 if they are stored in it."""
        dtype = self._tensor.dtype
        stored = self.raw(box).reshape(-1).view(storage_dtype(dtype, DTYPE_BITS[dtype]))
        return cast(stored, dtype, self.wide_dtype)


def _weighted_sum(values: Sequence[Array], weights: Sequence[float]) -> Array:
    total = np.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total += value.dtype.type(weight) * value
    return total


def _bytes_of(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
