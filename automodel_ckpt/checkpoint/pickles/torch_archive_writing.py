"""Write a file that ``torch.load(weights_only=True)`` reads: plain values and tensors, streamed. Imports no torch.

Such a file is a zip archive (source: PKWARE APPNOTE 4.3) without compression. Each record has a local header, padded
so that its data begin at a multiple of 64 bytes, the data, and a descriptor with their CRC-32. The directory follows in
its 64-bit form. The first record is a pickle of the value, in which a tensor is a call of
``torch._utils._rebuild_tensor_v2`` with a reference to a storage. Each storage is one record with the raw bytes
(source: torch.serialization and torch._utils, torch 2.13).
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, TORCH_NAMES
from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.parts.slices import nbytes_of

_ALIGN = 64
_FLAGS = 0x0808  # sizes and CRC follow the data; names are UTF-8
_MADE_BY, _NEEDED = 0x031E, 0x002D  # Unix, 3.0; 4.5: 64-bit sizes
_MAX_32 = 0xFFFFFFFF
MARKS_BEFORE = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
"""The records that torch writes between the pickle and the data."""
MARKS_AFTER = {"version": b"3\n", ".data/serialization_id": b"0" * 40}
"""The records that torch writes after the data. Its identifier has the same length and consists of hashes; no reader
uses it."""


@dataclass(slots=True)
class ZipRecords:
    """Builds the bytes of an archive, one record after another.

    The caller takes the bytes out of *written*, and writes the data of large records itself: *skipped* counts the bytes
    of the archive that precede those in *written*.
    """

    written: bytearray = field(default_factory=bytearray)
    skipped: int = 0
    _path: bytes = b""
    _start: int = 0
    _entries: list[bytes] = field(default_factory=list)

    @property
    def position(self) -> int:
        """The number of bytes of the archive so far."""
        return self.skipped + len(self.written)

    def add(self, name: str, content: bytes) -> None:
        """Write a small record with its data."""
        self.begin(name)
        self.written += content
        self.end(len(content), zlib.crc32(content))

    def begin(self, name: str) -> None:
        """Begin a record: write its local header, padded so that the data is aligned."""
        path = f"archive/{name}".encode()
        self._path, self._start = path, self.position
        unpadded = self._start + 30 + len(path) + 4
        padding = -unpadded % _ALIGN
        self.written += struct.pack(
            "<4s5H3I2H", b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(path), padding + 4
        )
        self.written += path + struct.pack("<2sH", b"FB", padding) + b"Z" * padding

    def end(self, nbytes: int, crc: int) -> None:
        """Write the descriptor that follows the data of the record, with 64-bit sizes where they are needed."""
        path, at = self._path, self._start
        self.written += struct.pack("<4sI", b"PK\7\b", crc)
        self.written += struct.pack("<2Q" if nbytes > _MAX_32 else "<2I", nbytes, nbytes)
        # Values above 32 bits are stored in an extra field of the directory's entry, in this order.
        large = [value for value in (nbytes, nbytes, at) if value > _MAX_32]
        extra = b""
        if large:
            extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large)
        short_nbytes = min(nbytes, _MAX_32)
        short_at = min(at, _MAX_32)
        entry = struct.pack(
            "<4s6H3I", b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0, crc, short_nbytes, short_nbytes
        )
        entry += struct.pack("<5H2I", len(path), len(extra), 0, 0, 0, 0, short_at)
        self._entries.append(entry + path + extra)

    def finish(self) -> None:
        """Write the directory, its 64-bit end record and locator, and its 32-bit end record."""
        directory = b"".join(self._entries)
        count = len(self._entries)
        size = len(directory)
        start = self.position
        end = start + size
        self.written += directory
        self.written += struct.pack(
            "<4sQ2H2I4Q", b"PK\6\6", 44, _MADE_BY, _NEEDED, 0, 0, count, count, size, start
        )
        self.written += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        self.written += struct.pack(
            "<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, min(start, _MAX_32), 0
        )


class TensorArchive(NamedTuple):
    """The bytes of an archive before its tensor's bytes, and after them."""

    head: bytes
    tail: bytes


Blocks = Callable[[], Iterable[bytes | memoryview]]

_TYPED_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
    "C128": "ComplexDoubleStorage",
}
# Items of a mapping between MARK and SETITEMS; Python's pickle module uses the same number.
_BATCH_ITEMS = 1000


@dataclass(eq=False, slots=True)
class ArchiveTensor:
    """A contiguous tensor in the value to write. The same object under two names makes them share one storage.

    *content* yields its bytes, row-major, in blocks. It is called once, when the record is written.
    """

    dtype: str
    shape: Shape
    content: Blocks

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


def write_torch_archive(file: BinaryIO, value: Any) -> None:
    """Write *value* to *file* as ``torch.save`` does: a tree of dicts, lists, tuples, text, numbers, bools, None and
    :class:`ArchiveTensor`.

    Memory: one block of a tensor, and the pickle. Raises OSError, TypeError for a value of another type, and ValueError
    for a tensor with content of another size.
    """
    program = _Program()
    program.save(value)
    records = ZipRecords()
    records.add("data.pkl", program.finished())
    for name, content in MARKS_BEFORE.items():
        records.add(name, content)
    for key, tensor in enumerate(program.tensors):
        _write_storage(file, records, f"data/{key}", tensor)
    for name, content in MARKS_AFTER.items():
        records.add(name, content)
    records.finish()
    file.write(records.written)


def plain_archive(value: Any) -> bytes:
    """Return the file that :func:`write_torch_archive` writes for *value*, which has no large tensors."""
    buffer = io.BytesIO()
    write_torch_archive(buffer, value)
    return buffer.getvalue()


@functools.lru_cache(maxsize=4096)
def described_archive(dtype: str, shape: Shape) -> TensorArchive:
    """Return the file of a single contiguous tensor of a safetensors *dtype*, without the bytes of the tensor.

    Their CRC-32 is left out (0), as with ``torch.serialization.set_crc32_options(False)``: torch does not read it.
    """
    tensor = ArchiveTensor(dtype, shape, tuple)
    program = _Program()
    program.save(tensor)
    records = ZipRecords()
    records.add("data.pkl", program.finished())
    for name, content in MARKS_BEFORE.items():
        records.add(name, content)
    records.begin("data/0")
    head = bytes(records.written)
    records.written.clear()
    records.skipped = len(head) + tensor.nbytes
    records.end(tensor.nbytes, 0)
    for name, content in MARKS_AFTER.items():
        records.add(name, content)
    records.finish()
    return TensorArchive(head, bytes(records.written))


def _write_storage(file: BinaryIO, records: ZipRecords, name: str, tensor: ArchiveTensor) -> None:
    records.begin(name)
    file.write(records.written)
    records.skipped += len(records.written)
    records.written.clear()
    nbytes = 0
    crc = 0
    for block in tensor.content():
        file.write(block)
        crc = zlib.crc32(block, crc)
        nbytes += len(block)
    if nbytes != tensor.nbytes:
        raise ValueError(f"a tensor has {nbytes} bytes, not {tensor.nbytes}")
    records.skipped += nbytes
    records.end(nbytes, crc)


# ---------------------------------------------------------------- the pickle


@dataclass(slots=True)
class _Program:
    """A pickle of protocol 2, torch's default. It is assembled here because Python's pickler would have to import
    torch in order to name its classes.

    *tensors* lists the storages in the order of their keys.
    """

    written: bytearray = field(default_factory=lambda: bytearray(pickle.PROTO + b"\x02"))
    tensors: list[ArchiveTensor] = field(default_factory=list)
    _keys: dict[int, int] = field(default_factory=dict)

    def finished(self) -> bytes:
        return bytes(self.written + pickle.STOP)

    def save(self, value: Any) -> None:
        """Append the instructions that build *value*."""
        if isinstance(value, ArchiveTensor):
            self._save_tensor(value)
        elif isinstance(value, Mapping):
            self._save_mapping(value)
        elif isinstance(value, list | tuple):
            self._save_sequence(value)
        # Exact types: a subclass, such as a NumPy number or an enumeration, would lose its type.
        elif value is None or type(value) in (bool, int, float, str):
            self.written += pickled(value)
        else:
            raise TypeError(f"a file of torch.save is written with plain values, not {type(value)}")

    def _save_mapping(self, value: Mapping[Any, Any]) -> None:
        self.written += pickle.EMPTY_DICT
        items = list(value.items())
        for start in range(0, len(items), _BATCH_ITEMS):
            self.written += pickle.MARK
            for key, item in items[start : start + _BATCH_ITEMS]:
                self.save(key)
                self.save(item)
            self.written += pickle.SETITEMS

    def _save_sequence(self, value: list[Any] | tuple[Any, ...]) -> None:
        is_list = isinstance(value, list)
        if is_list:
            self.written += pickle.EMPTY_LIST
            if not value:
                return
        self.written += pickle.MARK
        for item in value:
            self.save(item)
        self.written += pickle.APPENDS if is_list else pickle.TUPLE

    def _save_tensor(self, tensor: ArchiveTensor) -> None:
        key = self._keys.setdefault(id(tensor), len(self.tensors))
        if key == len(self.tensors):
            self.tensors.append(tensor)
        is_typed = tensor.dtype in _TYPED_STORAGES
        rebuild = "_rebuild_tensor_v2" if is_typed else "_rebuild_tensor_v3"
        self._save_global("torch._utils", rebuild)
        self.written += pickle.MARK
        self._save_storage(tensor, key)
        self.save(0)
        self.save(tensor.shape)
        self.save(_strides(tensor.shape))
        self.save(False)  # requires_grad
        self._save_global("collections", "OrderedDict")  # backward hooks: none
        self.written += pickle.EMPTY_TUPLE + pickle.REDUCE
        if not is_typed:
            self._save_global("torch", TORCH_NAMES[tensor.dtype])
        self.written += pickle.TUPLE + pickle.REDUCE

    def _save_storage(self, tensor: ArchiveTensor, key: int) -> None:
        self.written += pickle.MARK
        self.save("storage")
        name = _TYPED_STORAGES.get(tensor.dtype)
        numel = math.prod(tensor.shape)
        if name is not None:
            self._save_global("torch", name)
        else:
            # Newer dtypes have no typed storage: the size of an untyped one is in bytes.
            self._save_global("torch.storage", "UntypedStorage")
            numel *= DTYPE_BITS[tensor.dtype] // 8
        self.save(str(key))
        self.save("cpu")
        self.save(numel)
        self.written += pickle.TUPLE + pickle.BINPERSID

    def _save_global(self, module: str, name: str) -> None:
        self.written += pickle.GLOBAL + f"{module}\n{name}\n".encode()


def pickled(value: object) -> bytes:
    """Return the instructions of a pickle for a plain value, which do not use the memo."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def _strides(shape: Shape) -> Shape:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        # torch counts an empty dimension as 1 in the strides of a contiguous tensor.
        step *= max(extent, 1)
    return tuple(reversed(strides))
