"""The header of a GGUF file: metadata and the places of tensors. It is not trusted: sizes are limited and validated.

Source: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and for the types of tensors
``enum ggml_type`` of ggml and ``enum llama_ftype`` of llama.cpp. Numbers are little-endian.
The library ``gguf`` is not used here: it allocates what a header claims.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Values
from automodel_ckpt.checkpoint.parts.slices import shape_fault
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_TENSORS = 1 << 17
_MAX_KEYS = 1 << 14
# Vocabularies have up to some hundred thousand entries, and as many merges.
_MAX_ELEMENTS = 1 << 23
_MAX_STRING = 1 << 22
# The total of the texts that are read: names of tensors, keys and values.
_MAX_TEXT = 1 << 26
_MAX_DIMENSIONS = 4
_MAX_NAME = 64
_DEFAULT_ALIGNMENT = 32
_ALIGNMENTS = tuple(1 << power for power in range(17))
# An array of strings of at most this many is kept; others are counted.
_MAX_KEPT = 64


@dataclass(frozen=True)
class Kind:
    """A type of tensor: its *number* in files, and *block_bytes* for each *block_size* elements of a row.

    *dtype* is the safetensors dtype of the same bytes, or None for quantized tensors. *file_type* is the number of a
    file that mostly has tensors of this type, or None for types that this program does not write.
    """

    name: str
    number: int
    block_size: int
    block_bytes: int
    dtype: str | None = None
    file_type: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.dtype is None


F32 = Kind("F32", 0, 1, 4, "F32", 0)
F16 = Kind("F16", 1, 1, 2, "F16", 1)
BF16 = Kind("BF16", 30, 1, 2, "BF16", 32)
Q8_0 = Kind("Q8_0", 8, 32, 34, None, 7)
_KINDS = (
    F32,
    F16,
    BF16,
    Kind("F64", 28, 1, 8, "F64"),
    Q8_0,
    Kind("Q4_0", 2, 32, 18, None, 2),
    Kind("Q4_1", 3, 32, 20, None, 3),
    Kind("Q5_0", 6, 32, 22, None, 8),
    Kind("Q5_1", 7, 32, 24, None, 9),
    # Read only: the library gguf dequantizes them, and does not quantize them.
    Kind("Q2_K", 10, 256, 84),
    Kind("Q3_K", 11, 256, 110),
    Kind("Q4_K", 12, 256, 144),
    Kind("Q5_K", 13, 256, 176),
    Kind("Q6_K", 14, 256, 210),
    Kind("IQ4_NL", 20, 32, 18),
    Kind("IQ4_XS", 23, 256, 136),
)
BY_NUMBER: Mapping[int, Kind] = {kind.number: kind for kind in _KINDS}
"""The types that are read, by their number in files."""
WRITABLE: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS if kind.file_type is not None}
"""The types that ``ckpt export --to gguf --type`` accepts, by name."""
QUANTIZATION_VERSION = 2
"""The version of the block layouts, ``general.quantization_version`` (``GGML_QNT_VERSION`` of ggml)."""

_FLOAT, _STRING, _ARRAY = 6, 8, 9
# The types of values in the metadata that have a fixed size, by number.
_SCALARS: Mapping[int, struct.Struct] = {
    number: struct.Struct(f"<{code}")
    for number, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}


@dataclass(frozen=True)
class ArrayOf:
    """A long array in the metadata, such as a vocabulary, which is not kept: its number of elements."""

    length: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file: its row-major *shape*, and the byte offset *start* in the file of its *nbytes* bytes."""

    name: str
    kind: Kind
    shape: Shape
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file. *values* are the metadata by key. Long arrays are :class:`ArrayOf`."""

    version: int
    values: Values
    tensors: Mapping[str, TensorInfo]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of the file *path*, which is not a symbolic link.

    Raises :class:`CheckpointUnusable` for a file that is not GGUF, is truncated, or contradicts itself.
    """
    with (
        faults_of(path, "this GGUF file is damaged, or cannot be read"),
        os.fdopen(open_regular(path), "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _Parser(content).header()


class _Parser:
    """Reads a header from front to back. Each method raises :class:`Fault` at the first contradiction."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0
        self._num_elements = 0
        self._text_bytes = 0

    def header(self) -> GgufHeader:
        magic, version = self._bytes(4), self._number(4)
        if magic != MAGIC or version not in _VERSIONS:
            raise Fault(f"it is not GGUF of version 2 or 3 in little-endian: version {version}")
        num_tensors = self._count(_MAX_TENSORS, "tensors")
        num_keys = self._count(_MAX_KEYS, "keys")
        values = {}
        for _ in range(num_keys):
            key = self._string()
            if key in values:
                raise Fault(f"the key {key[:100]!r} occurs twice")
            values[key] = self._value(self._number(4))
        places = [self._tensor_place() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment not in _ALIGNMENTS:
            raise Fault(f"general.alignment is {alignment!r:.50}, not a power of two")
        return GgufHeader(version, values, self._tensors(places, int(alignment)))

    def _tensor_place(self) -> tuple[str, Kind, Shape, int]:
        """Return name, type, row-major shape and the offset in the data section."""
        name = self._string()
        num_dimensions = self._number(4)
        is_long = len(name.encode()) >= _MAX_NAME or num_dimensions > _MAX_DIMENSIONS
        if is_long or not name.isprintable():
            raise Fault(
                f"no tensor of {num_dimensions} dimensions can have the name {name[:100]!r}"
            )
        # The file has the innermost dimension first.
        shape = tuple(self._number(8) for _ in range(num_dimensions))[::-1]
        number = self._number(4)
        kind = BY_NUMBER.get(number)
        if kind is None:
            raise Fault(f"the tensor {name!r} has the type {number}, which is not read")
        fault = shape_fault(shape)
        if fault:
            raise Fault(f"the tensor {name!r}: {fault}")
        return name, kind, shape, self._number(8)

    def _tensors(
        self, places: list[tuple[str, Kind, Shape, int]], alignment: int
    ) -> dict[str, TensorInfo]:
        """Return the tensors. Their data begin at the next multiple of *alignment*, one after the other."""
        data = -(-self._at // alignment) * alignment
        expected = 0
        tensors = {}
        for name, kind, shape, offset in places:
            if name in tensors:
                raise Fault(f"the tensor {name!r} occurs twice")
            row = shape[-1] if shape else 1
            if row % kind.block_size:
                raise Fault(f"the rows of {name!r} are not whole blocks of {kind.name}")
            nbytes = math.prod(shape) // kind.block_size * kind.block_bytes
            # Programs write them without gaps, and llama.cpp accepts no other files.
            if offset != expected:
                raise Fault(f"the tensor {name!r} begins at {offset}, not at {expected}")
            start = data + offset
            if start + nbytes > len(self._content):
                raise Fault(f"the tensor {name!r} ends at {start + nbytes} of {len(self._content)}")
            tensors[name] = TensorInfo(name, kind, shape, start, nbytes)
            expected = -(-(offset + nbytes) // alignment) * alignment
        return tensors

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise Fault(f"a value has the unknown type {kind}")
        value = scalar.unpack(self._bytes(scalar.size))[0]
        if kind != _FLOAT:
            return value
        # Imported only here: listing files has to be fast.
        import numpy as np

        # The number of the fewest digits: 1e-06, and not 9.999999974752427e-07.
        return float(str(np.float32(value)))

    def _array(self) -> Any:
        kind = self._number(4)
        length = self._count(_MAX_ELEMENTS, "elements of an array")
        self._num_elements += length
        if self._num_elements > _MAX_ELEMENTS:
            raise Fault(f"its arrays have more than {_MAX_ELEMENTS} elements")
        if kind not in _SCALARS and kind != _STRING:
            raise Fault(f"an array has elements of the type {kind}")
        if length <= _MAX_KEPT:
            return [self._value(kind) for _ in range(length)]
        if kind in _SCALARS:
            self._skip(length * _SCALARS[kind].size)
        else:
            for _ in range(length):
                self._skip(self._number(8))
        return ArrayOf(length)

    def _string(self) -> str:
        length = self._number(8)
        self._text_bytes += length
        if length > _MAX_STRING or self._text_bytes > _MAX_TEXT:
            raise Fault(f"a text of {length} bytes")
        return self._bytes(length).decode()

    def _count(self, limit: int, what: str) -> int:
        count = self._number(8)
        if count > limit:
            raise Fault(f"{count} {what}, and at most {limit} are read")
        return count

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._bytes(nbytes), "little")

    def _bytes(self, nbytes: int) -> bytes:
        begin = self._at
        self._skip(nbytes)
        return self._content[begin : self._at]

    def _skip(self, nbytes: int) -> None:
        if nbytes > len(self._content) - self._at:
            raise Fault("it ends within its header")
        self._at += nbytes
