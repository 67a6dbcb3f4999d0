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
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import Shape, ValueDict
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, counts, nbytes_of, shape_fault
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of, names_in, tiled

ARRAY = ".zarray"
# The names of dtypes in ``.zarray``, and their safetensors codes.
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
_MAX_ARRAY_BYTES = 1 << 20
_HINT = "write it without compression, as Megatron-Core does, or as safetensors"
_MAX_CHUNKS = 1 << 20


@dataclass(frozen=True)
class ZarrArray:
    """The content of ``.zarray``: safetensors dtype code, shape, and shape of a chunk."""

    name: str
    dtype: str
    shape: Shape
    chunks: Shape

    @property
    def grid(self) -> Shape:
        """The number of chunks in each dimension."""
        pairs = zip(self.shape, self.chunks, strict=True)
        return tuple(-(-extent // size) for extent, size in pairs)


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
    if value.get("dimension_separator", ".") != ".":
        raise Fault("the names of its chunks have another separator than .")
    shape, chunks = counts(value["shape"]), counts(value["chunks"])
    if shape is None or chunks is None or shape_fault(shape) or shape_fault(chunks):
        raise Fault(f"its shape is invalid: {value['shape']!r:.100}, {value['chunks']!r:.100}")
    # Another dtype is a KeyError, a chunk without elements or of other dimensions another error.
    array = ZarrArray(name, _DTYPES[value["dtype"]], shape, chunks)
    if math.prod(array.grid) > _MAX_CHUNKS:
        raise Fault(f"it has too many chunks: {math.prod(array.grid)}")
    return array


# ---------------------------------------------------------------- chunks


def zarr_tensor(directory: Path, array: ZarrArray) -> Tensor:
    """Describe an array in *directory*. Raises :class:`CheckpointUnusable` if a chunk is missing or damaged."""
    slices = []
    chunk_bytes = nbytes_of(array.dtype, array.chunks)
    strides = tuple(math.prod(array.chunks[at + 1 :]) for at in range(len(array.chunks)))
    with faults_of(directory / array.name, "the chunks of this array do not make it up"):
        for index in itertools.product(*map(range, array.grid)):
            file = f"{array.name}/{'.'.join(map(str, index)) or '0'}"
            _check_chunk(directory / file, chunk_bytes)
            offsets, sizes = [], []
            for position, size, extent in zip(index, array.chunks, array.shape, strict=True):
                offsets.append(position * size)
                sizes.append(min(size, extent - position * size))
            box = (tuple(offsets), tuple(sizes))
            # A chunk at the end of a dimension has values beyond it, which the strides skip.
            apart = strides if box[1][1:] != array.chunks[1:] else None
            nbytes = nbytes_of(array.dtype, sizes)
            slices.append(Slice(array.name, array.dtype, *box, file, 0, nbytes, strides=apart))
    return tiled(array.name, array.dtype, array.shape, slices, directory / array.name)


def _check_chunk(path: Path, chunk_bytes: int) -> None:
    """Raise :class:`Fault` unless a chunk is a regular file of *chunk_bytes*, OSError if it is missing."""
    status = os.lstat(path)
    if path.parent.is_symlink() or not stat.S_ISREG(status.st_mode):
        raise Fault(f"{path.name} is not a regular file")
    if status.st_size != chunk_bytes:
        raise Fault(f"{path.name} has the wrong size: {status.st_size} bytes, not {chunk_bytes}")
