"""Arrays of zarr (version 2): a directory for each tensor. Imports no torch.

The deprecated backend ``zarr`` of Megatron-Core writes such directories, without compression. ``.zarray`` describes the
array, and each chunk is a file, named by its position in the grid of chunks (source: the zarr v2 specification).
All chunks have the same shape; those at the end of a dimension contain values beyond it. The bytes of a chunk are the
slice itself.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, counts, nbytes_of, shape_fault
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of, names_in, tiled
from automodel_ckpt.convert.type_aliases import Shape, ValueDict

ARRAY = ".zarray"
_DTYPES = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "bfloat16": "BF16",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "|u1": "U8",
    "|b1": "BOOL",
}
"""The names of dtypes in ``.zarray``, and their safetensors codes."""
_MAX_ARRAY_BYTES = 1 << 20
_HINT = "write it without compression, as Megatron-Core does, or as safetensors"
_MAX_CHUNKS = 1 << 20
_MAX_SLICES = 1 << 16


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The content of ``.zarray``: safetensors dtype code, shape, shape of a chunk, and the separator in chunk names."""

    name: str
    dtype: str
    shape: Shape
    chunks: Shape
    separator: str

    @property
    def grid(self) -> Shape:
        """The number of chunks in each dimension."""
        pairs = zip(self.shape, self.chunks, strict=True)
        return tuple(-(-extent // size) for extent, size in pairs)

    def chunk_file(self, index: Shape) -> str:
        """Return the path of a chunk, relative to the directory of all arrays."""
        return f"{self.name}/{self.separator.join(map(str, index)) or '0'}"


def read_arrays(directory: Path) -> dict[str, ZarrArray]:
    """Return the arrays in the subdirectories of *directory*, by name. Raises :class:`CheckpointUnusable`."""
    found = {}
    for name in names_in(directory):
        place = directory / name
        if place.is_symlink() or not os.path.lexists(place / ARRAY):
            continue
        with faults_of(place / ARRAY, "this array is not read", _HINT):
            value = parse_json(read_safely(place, ARRAY, limit=_MAX_ARRAY_BYTES))
            found[name] = _array(name, value)
    return found


# ---------------------------------------------------------------- .zarray


def _array(name: str, value: ValueDict) -> ZarrArray:
    expected = {"zarr_format": 2, "order": "C", "filters": None, "compressor": None}
    for key, usual in expected.items():
        if value.get(key) not in (usual, []):
            raise Fault(f"its {key} is {value.get(key)!r:.200}")
    shape, chunks = counts(value["shape"]), counts(value["chunks"])
    if shape is None or chunks is None or len(shape) != len(chunks) or 0 in chunks:
        raise Fault("its shape is invalid")
    fault = shape_fault(shape) or shape_fault(chunks)
    if fault is not None:
        raise Fault(fault)
    dtype, separator = value["dtype"], value.get("dimension_separator", ".")
    if dtype not in _DTYPES or separator not in (".", "/"):
        raise Fault(
            f"its dtype is {dtype!r:.100}, and the names of its chunks have {separator!r:.50}"
        )
    array = ZarrArray(name, _DTYPES[dtype], shape, chunks, separator)
    if math.prod(array.grid) > _MAX_CHUNKS:
        raise Fault(f"it has too many chunks: {math.prod(array.grid)}")
    return array


# ---------------------------------------------------------------- chunks


def zarr_tensor(directory: Path, array: ZarrArray) -> Tensor:
    """Describe an array in *directory*. Raises :class:`CheckpointUnusable` if a chunk is missing or damaged."""
    slices: list[Slice] = []
    chunk_bytes = nbytes_of(array.dtype, array.chunks)
    with faults_of(directory / array.name, "the chunks of this array do not make it up"):
        for index in itertools.product(*map(range, array.grid)):
            file = array.chunk_file(index)
            _check_chunk(directory / file, chunk_bytes)
            slices.extend(_slices(array, index, file))
            if len(slices) > _MAX_SLICES:
                raise Fault(f"they are cut into more than {_MAX_SLICES} parts")
    return tiled(array.name, array.dtype, array.shape, slices, directory / array.name)


def _check_chunk(path: Path, chunk_bytes: int) -> None:
    """Raise :class:`Fault` unless a chunk is a regular file of *chunk_bytes*, OSError if it is missing."""
    status = os.lstat(path)
    if path.parent.is_symlink() or not stat.S_ISREG(status.st_mode):
        raise Fault(f"{path.name} is not a regular file")
    if status.st_size != chunk_bytes:
        raise Fault(f"{path.name} has the wrong size: {status.st_size} bytes, not {chunk_bytes}")


def _slices(array: ZarrArray, index: Shape, file: str) -> Iterator[Slice]:
    """Yield the slices of one chunk: one, or several if it contains values beyond the end of an inner dimension."""
    offsets = [position * size for position, size in zip(index, array.chunks, strict=True)]
    ends = zip(offsets, array.chunks, array.shape, strict=True)
    sizes = [min(size, extent - offset) for offset, size, extent in ends]
    # The last dimension that is not complete in the chunk: each index of those before it is apart in the file.
    num_apart = 0
    for dimension in range(1, len(sizes)):
        if sizes[dimension] != array.chunks[dimension]:
            num_apart = dimension
    for outer in itertools.product(*map(range, sizes[:num_apart])):
        start = 0
        for dimension, position in enumerate(outer):
            start += position * nbytes_of(array.dtype, array.chunks[dimension + 1 :])
        at = [offset + position for offset, position in zip(offsets, outer, strict=False)]
        box_offsets = (*at, *offsets[num_apart:])
        box_sizes = (*[1] * num_apart, *sizes[num_apart:])
        nbytes = nbytes_of(array.dtype, box_sizes)
        yield Slice(array.name, array.dtype, box_offsets, box_sizes, file, start, nbytes)
