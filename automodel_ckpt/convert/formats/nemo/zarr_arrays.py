"""Arrays of zarr (version 2): a directory for each tensor. Imports no torch, and tensorstore only for compressed ones.

The deprecated backend ``zarr`` of Megatron-Core writes such directories, as does ``ckpt export --to zarr``. ``.zarray``
describes the array, and each chunk is a file whose name has its position in the grid of chunks (source: the zarr v2
specification). All chunks have the same shape; those at the end of a dimension contain values beyond it. The bytes of
an uncompressed chunk are the slice itself. Compressed chunks are decoded once by tensorstore, the extra ``zarr``.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, counts, nbytes_of, whole_tensor
from automodel_ckpt.checkpoint.parts.tiling import shape_fault, tiling_fault
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.convert.decoded import decoded_directory
from automodel_ckpt.convert.formats.files import names_in
from automodel_ckpt.convert.formats.format import Format, Inventory, TensorSummary
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

ARRAY = ".zarray"
DTYPES = {
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
_UNCHECKED = "these arrays are unchecked: there is no manifest with their digests"
_MAX_ARRAY_BYTES = 1 << 20
_MAX_CHUNKS = 1 << 20
_MAX_SLICES = 1 << 16
# What compression can gain on weights is a factor of two or so. A larger one means fill values, or a bomb.
_MAX_RATIO = 64
_FREE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The content of ``.zarray``: safetensors dtype code, shape, shape of a chunk, and the separator in chunk names."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    separator: str
    is_compressed: bool

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks in each dimension."""
        pairs = zip(self.shape, self.chunks, strict=True)
        return tuple(-(-extent // size) for extent, size in pairs)

    def chunk_file(self, index: tuple[int, ...]) -> str:
        """Return the path of a chunk, relative to the directory of all arrays."""
        return f"{self.name}/{self.separator.join(map(str, index)) or '0'}"


class ZarrArrays(Format):
    """A directory whose subdirectories are arrays of zarr."""

    name = "arrays of zarr"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        return any((path / name / ARRAY).is_file() for name in names_in(path))

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the arrays. Symbolic links are never followed."""
        return zarr_source(path, read_arrays(path))

    def parts(self, path: Path) -> frozenset[str]:
        return frozenset(name for name in names_in(path) if (path / name / ARRAY).is_file())

    def inventory(self, path: Path) -> Inventory:
        return zarr_inventory(read_arrays(path))


def read_arrays(directory: Path) -> dict[str, ZarrArray]:
    """Return the arrays in the subdirectories of *directory*, by name. Raises :class:`CheckpointUnusable`."""
    found: dict[str, ZarrArray] = {}
    for name in names_in(directory):
        place = directory / name
        if place.is_symlink() or not os.path.lexists(place / ARRAY):
            continue
        try:
            value = parse_json(read_safely(place, ARRAY, limit=_MAX_ARRAY_BYTES))
        except (OSError, ValueError) as error:
            raise unusable("this file cannot be read", place / ARRAY, repr(error)[:200]) from error
        found[name] = _array(name, value, place / ARRAY)
    return found


def zarr_inventory(arrays: Mapping[str, ZarrArray]) -> Inventory:
    """Return the names, dtypes and shapes of *arrays* for display."""
    summaries = {
        name: TensorSummary(array.dtype, array.shape, math.prod(array.grid))
        for name, array in arrays.items()
    }
    return Inventory(summaries)


def zarr_source(directory: Path, arrays: Mapping[str, ZarrArray]) -> Source:
    """Describe the tensors of *arrays* in *directory*. Compressed ones are decoded to a temporary directory.

    Raises :class:`CheckpointUnusable` if a chunk is missing or damaged, and :class:`RecipeError` if an array is
    compressed and tensorstore is not installed.
    """
    if not arrays:
        raise unusable("there are no arrays of zarr here", directory, f"no */{ARRAY}")
    compressed = {name: array for name, array in arrays.items() if array.is_compressed}
    if not compressed:
        tensors = {name: _tensor(directory, array, "") for name, array in arrays.items()}
        return Source(directory, directory, tensors, notes=(_UNCHECKED,))
    # Slices name files below a root, and the decoded ones are in another directory.
    real = Path(os.path.realpath(directory))
    tensors = {}
    for name, array in arrays.items():
        if name in compressed:
            tensors[name] = _decoded(real, array)
        else:
            tensors[name] = _tensor(real, array, str(real).lstrip("/") + "/")
    return Source(Path("/"), directory, tensors, notes=(_UNCHECKED,))


# ---------------------------------------------------------------- .zarray


def _array(name: str, value: Any, path: Path) -> ZarrArray:
    if not isinstance(value, dict) or value.get("zarr_format") != 2:
        raise unusable("this array has another version than zarr 2", path, str(value)[:100])
    shape, chunks = counts(value.get("shape")), counts(value.get("chunks"))
    if shape is None or chunks is None or len(shape) != len(chunks) or 0 in chunks:
        raise unusable("the shape of this array is invalid", path, str(value)[:200])
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise unusable("the dtype of this array is not supported", path, str(dtype)[:100])
    separator = value.get("dimension_separator", ".")
    if value.get("order", "C") != "C" or separator not in (".", "/") or value.get("filters"):
        what = "this array is stored in an unusual way (order, filters or names of chunks)"
        raise unusable(what, path, str(value)[:200])
    fault = shape_fault(shape) or shape_fault(chunks)
    if fault is not None:
        raise unusable("the shape of this array is invalid", path, fault)
    array = ZarrArray(
        name, DTYPES[dtype], shape, chunks, separator, value.get("compressor") is not None
    )
    if math.prod(array.grid) > _MAX_CHUNKS:
        raise unusable("this array has too many chunks", path, math.prod(array.grid))
    return array


# ---------------------------------------------------------------- chunks


def _tensor(directory: Path, array: ZarrArray, prefix: str) -> Tensor:
    """Describe an uncompressed array. *prefix* leads from the root of the source to *directory*."""
    slices: list[Slice] = []
    chunk_bytes = nbytes_of(array.dtype, array.chunks)
    for index in itertools.product(*map(range, array.grid)):
        file = array.chunk_file(index)
        _check_chunk(directory, file, chunk_bytes)
        slices.extend(_slices(array, index, prefix + file))
        if len(slices) > _MAX_SLICES:
            what = "the chunks of this array are cut into too many parts"
            raise unusable(what, directory / array.name, f"more than {_MAX_SLICES}")
    fault = tiling_fault([stored.box for stored in slices], array.shape)
    if fault is not None:
        raise unusable("the chunks of this array do not make it up", directory / array.name, fault)
    return Tensor(array.name, array.dtype, array.shape, tuple(slices))


def _check_chunk(directory: Path, file: str, chunk_bytes: int) -> None:
    """Raise :class:`CheckpointUnusable` unless a chunk is a regular file of the size that *chunk_bytes* states."""
    path = directory / file
    try:
        status = os.lstat(path)
        is_linked = path.parent.is_symlink()
    except OSError as error:
        raise unusable("a chunk of this array is missing", path, error.strerror) from error
    if is_linked or not stat.S_ISREG(status.st_mode):
        raise unusable("a chunk of this array is not a regular file", path, "a link or other file")
    if status.st_size != chunk_bytes:
        found = f"{status.st_size} bytes, not {chunk_bytes}"
        raise unusable("a chunk of this array has the wrong size", path, found)


def _slices(array: ZarrArray, index: tuple[int, ...], file: str) -> Iterator[Slice]:
    """Yield the slices of one chunk: one, or several if it contains values beyond the end of an inner dimension."""
    offsets: list[int] = []
    sizes: list[int] = []
    for position, size, extent in zip(index, array.chunks, array.shape, strict=True):
        offsets.append(position * size)
        sizes.append(min(size, extent - position * size))
    # The last dimension that is not complete in the chunk: each index of those before it is apart in the file.
    num_apart = 0
    for dimension in range(1, len(sizes)):
        if sizes[dimension] != array.chunks[dimension]:
            num_apart = dimension
    itemsize = DTYPE_BITS[array.dtype] // 8
    inner_sizes = tuple(sizes[num_apart:])
    for outer in itertools.product(*map(range, sizes[:num_apart])):
        start = 0
        for dimension, position in enumerate(outer):
            start += position * math.prod(array.chunks[dimension + 1 :]) * itemsize
        at = [offset + position for offset, position in zip(offsets, outer, strict=False)]
        box_offsets = (*at, *offsets[num_apart:])
        box_sizes = (*[1] * num_apart, *inner_sizes)
        nbytes = nbytes_of(array.dtype, box_sizes)
        yield Slice(array.name, array.dtype, box_offsets, box_sizes, file, start, nbytes)


# ---------------------------------------------------------------- compressed arrays


def load_tensorstore(where: str) -> Any:
    """Return the module tensorstore. Raises :class:`RecipeError`, which names the extra, if it is not installed."""
    try:
        return importlib.import_module("tensorstore")
    except ImportError as error:
        raise RecipeError(
            "compressed arrays of zarr need the package tensorstore",
            where=where,
            value=str(error),
            hint="pip install 'automodel_ckpt[zarr]'",
        ) from error


def _decoded(directory: Path, array: ZarrArray) -> Tensor:
    """Decode a compressed array to a temporary file, and describe it there."""
    library = load_tensorstore(str(directory / array.name))
    place = directory / array.name
    stored = 0
    for entry in os.scandir(place):
        if not entry.is_file(follow_symlinks=False):
            raise unusable("a chunk of this array is not a regular file", Path(entry.path), "")
        stored += entry.stat(follow_symlinks=False).st_size
    nbytes = nbytes_of(array.dtype, array.shape)
    if nbytes > max(_FREE_BYTES, stored * _MAX_RATIO):
        found = f"{nbytes} bytes in files of {stored}"
        raise unusable("this array is larger than its files can contain", place, found)
    for index in itertools.product(*map(range, array.grid)):
        if not (directory / array.chunk_file(index)).is_file():
            raise unusable("a chunk of this array is missing", place, array.chunk_file(index))
    decode = partial(_decode, library, place, array)
    file = decoded_directory(place / ARRAY, f"zarr {stored}", decode) / "values"
    return whole_tensor(array.name, array.dtype, array.shape, str(file).lstrip("/"), 0)


def _decode(library: Any, place: Path, array: ZarrArray, target: Path) -> None:
    """Write the values of an array to the file *values*, row-major, some rows at a time."""
    specification = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(place)}}
    try:
        opened = library.open(specification, open=True, read=True).result()
        with (target / "values").open("wb") as file:
            if not array.shape:
                file.write(opened.read().result().tobytes())
                return
            step = array.chunks[0]
            for first in range(0, array.shape[0], step):
                values = opened[first : min(first + step, array.shape[0])].read().result()
                file.write(values.tobytes())
    except (ValueError, TypeError) as error:
        raise CheckpointUnusable(
            "this array of zarr cannot be decoded",
            where=str(place),
            value=str(error)[:300],
            hint="take the files from another copy",
        ) from error
