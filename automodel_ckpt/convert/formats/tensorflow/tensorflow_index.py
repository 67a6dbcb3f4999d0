"""Read the index of a TensorFlow checkpoint: a sorted table of names and protocol buffers. Imports no torch.

Layout (source: tensorflow/core/lib/io/table_format.txt, tensorflow/core/util/tensor_bundle and
tensorflow/core/protobuf/tensor_bundle.proto, TensorFlow 2.21). A table is a sequence of blocks, each followed by a byte
for its compression and a masked CRC-32C. A block has entries, whose keys share a prefix with the key before them,
and the positions of some entries at its end. The footer, the last 48 bytes, points to the block that lists the other
blocks.

The table of a checkpoint is not compressed. Its key ``""`` has a BundleHeaderProto, each other key is the name of a
variable with a BundleEntryProto. The tensors are raw bytes in the ``.data`` files. Nothing here needs TensorFlow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.type_aliases import Shape

FOOTER_BYTES = 48
MAX_INDEX_BYTES = 64 << 20
_MAGIC = 0xDB4775248B80FB57
_TRAILER_BYTES = 5
_MAX_ENTRIES = 200_000
_MAX_KEY_BYTES = 4096
# The keys of a block share prefixes, so that a small file could describe long names.
_MAX_ALL_KEYS_BYTES = 32 << 20
_MAX_DIMENSIONS = 64
_CRC_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78
_DTYPES = {
    1: "F32",
    2: "F64",
    3: "I32",
    4: "U8",
    5: "I16",
    6: "I8",
    8: "C64",
    9: "I64",
    10: "BOOL",
    14: "BF16",
    17: "U16",
    18: "C128",
    19: "F16",
    22: "U32",
    23: "U64",
    24: "F8_E5M2",
    25: "F8_E4M3",
}
"""Numbers of the enumeration DataType (tensorflow/core/framework/types.proto), as codes of the safetensors format."""
_STRING = 7
_VARIANT = 21
assert set(_DTYPES.values()) <= DTYPE_BITS.keys()


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in the checkpoint: *nbytes* at byte *offset* of the data file number *shard*.

    *dtype* is a safetensors code; None for values without a fixed size (text, variants). A *partitioned* variable is
    stored in several entries under other keys.
    """

    name: str
    dtype: str | None
    shape: Shape
    shard: int
    offset: int
    nbytes: int
    partitioned: bool


def is_index(footer: bytes) -> bool:
    """Return whether a file that ends in *footer* (48 bytes) is a sorted table."""
    return len(footer) == FOOTER_BYTES and footer[40:] == struct.pack("<Q", _MAGIC)


def read_index(data: bytes) -> tuple[int, list[Variable]]:
    """Return the number of data files, and the variables in the index *data*. Raises :class:`Fault`."""
    num_shards = 0
    variables = []
    for key, value in _table(data):
        if key == b"":
            num_shards = _header(value)
            continue
        if key[:1] == b"\0":
            # A part of a partitioned variable, which has an entry under its name too.
            continue
        try:
            name = key.decode()
        except UnicodeDecodeError:
            raise Fault("a name in it is not UTF-8") from None
        if not name.isprintable():
            raise Fault(f"a name in it is not printable: {name[:100]!r}")
        variables.append(_variable(name, value))
    if not 0 < num_shards <= 1 << 16:
        raise Fault("it does not state the number of data files")
    return num_shards, variables


# ---------------------------------------------------------------- the table


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table, which are in the order of their keys."""
    if not is_index(data[-FOOTER_BYTES:]):
        raise Fault("its end is missing: it is truncated, or no index")
    footer = _Bytes(data[-FOOTER_BYTES:-8])
    # The block with metadata is empty. Reading it compares its checksum, so that every byte of the index is covered.
    _block(data, *_handle(footer))
    blocks = _block(data, *_handle(footer))
    last_key = None
    num_entries = 0
    keys_bytes = 0
    for _, value in _entries(blocks):
        offset, size = _handle(_Bytes(value))
        for key, content in _entries(_block(data, offset, size)):
            # The order also makes sure that no block is listed twice.
            if last_key is not None and key <= last_key:
                raise Fault("its keys are not in order")
            last_key = key
            num_entries += 1
            keys_bytes += len(key)
            if num_entries > _MAX_ENTRIES or keys_bytes > _MAX_ALL_KEYS_BYTES:
                raise Fault("it has more entries than a model")
            yield key, content


def _block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _TRAILER_BYTES > len(data):
        raise Fault("one of its blocks is not in the file")
    compression = data[end]
    if compression != 0:
        raise Fault(f"it is compressed (kind {compression}), which TensorFlow does not do")
    (stored,) = struct.unpack_from("<I", data, end + 1)
    if stored != _masked_crc(data[offset : end + 1]):
        raise Fault("the checksum of one of its blocks is wrong")
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise Fault("one of its blocks is too short")
    (num_restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (num_restarts + 1)
    if end < 0:
        raise Fault("one of its blocks is too short")
    content = _Bytes(block[:end])
    key = b""
    while not content.at_end:
        shared = content.varint()
        num_new = content.varint()
        value_bytes = content.varint()
        if shared > len(key) or shared + num_new > _MAX_KEY_BYTES:
            raise Fault("the length of a name is wrong")
        key = key[:shared] + content.take(num_new)
        yield key, content.take(value_bytes)


def _handle(content: _Bytes) -> tuple[int, int]:
    return content.varint(), content.varint()


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(map(_crc_of, range(256)))


def _masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of *data* (source: tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _CRC_DELTA) & 0xFFFFFFFF


# ---------------------------------------------------------------- protocol buffers


class _Bytes:
    """Bytes that are read from their beginning. Methods raise :class:`Fault` at the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise Fault("an entry of it is truncated")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def varint(self) -> int:
        """Read a number of up to 64 bits, seven bits in a byte, the lowest first."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise Fault("a number in it is too long")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message: an integer or bytes."""
    content = _Bytes(data)
    while not content.at_end:
        tag = content.varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, content.varint()
        elif kind in (1, 5):
            yield tag >> 3, int.from_bytes(content.take(8 if kind == 1 else 4), "little")
        elif kind == 2:
            yield tag >> 3, content.take(content.varint())
        else:
            raise Fault("an entry of it is no protocol buffer")


def _header(data: bytes) -> int:
    """Return the number of data files from a BundleHeaderProto."""
    fields = dict(_fields(data))
    if fields.get(2, 0) != 0:
        raise Fault("it was written on a machine of the other byte order")
    num_shards = fields.get(1, 0)
    return num_shards if isinstance(num_shards, int) else 0


def _variable(name: str, data: bytes) -> Variable:
    """Return the variable that a BundleEntryProto describes."""
    fields = dict(_fields(data))
    numbers = {field: value for field, value in fields.items() if isinstance(value, int)}
    stated = fields.get(2, b"")
    shape = _shape(name, stated) if isinstance(stated, bytes) else ()
    number = numbers.get(1, 0)
    dtype = _DTYPES.get(number)
    if dtype is None and number not in (_STRING, _VARIANT):
        raise Fault(f"{name!r} has an unknown dtype (number {number})")
    shard, offset, nbytes = (numbers.get(field, 0) for field in (3, 4, 5))
    return Variable(name, dtype, shape, shard, offset, nbytes, 7 in fields)


def _shape(name: str, data: bytes) -> Shape:
    extents = []
    for field, value in _fields(data):
        if field != 2 or not isinstance(value, bytes):
            continue
        # A dimension of 0 is not written: it is the default of the field.
        extent = dict(_fields(value)).get(1, 0)
        # A negative number, for an unknown dimension, has all its 64 bits.
        if not isinstance(extent, int) or extent >= 1 << 63:
            raise Fault(f"the shape of {name!r} is not known")
        extents.append(extent)
    if len(extents) > _MAX_DIMENSIONS:
        raise Fault(f"{name!r} has {len(extents)} dimensions")
    return tuple(extents)
