"""Checkpoints of TensorFlow: ``PREFIX.index`` and ``PREFIX.data-*``, read without TensorFlow. Imports no torch.

The index has the byte range of each variable in a data file. Tensors have the variables' names. A checkpoint of objects
(``tf.train.Checkpoint``, Keras) adds ``/.ATTRIBUTES/VARIABLE_VALUE`` to each, which is removed. Variables of
optimizers, counters and text are not part of the model.

The index is a sorted table (source: tensorflow/core/lib/io/table_format.txt, tensorflow/core/util/tensor_bundle and
tensorflow/core/protobuf/tensor_bundle.proto, TensorFlow 2.21): a sequence of blocks, each followed by a byte for its
compression and a masked CRC-32C. A block has entries, and the positions of some entries at its end. The key of
an entry shares a prefix with the key before it. The footer, the last 48 bytes, points to the block that lists the other
blocks. The key ``""`` has a BundleHeaderProto. Each other key is the name of a variable with a BundleEntryProto.

The kernel of a dense layer is stored as [inputs, outputs], the transpose of torch's. It is not transposed here.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.units import others_text
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_regular, read_safely
from automodel_ckpt.checkpoint.parts.slices import Tensor, nbytes_of, shape_fault, whole_tensor
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import check_regular_files, faults_of, names_in, reports
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.type_aliases import Shape, TensorDict

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
            num_shards = _num_shards(value)
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


def _num_shards(data: bytes) -> int:
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


INDEX_SUFFIX = ".index"
_STATE_FILE = "checkpoint"
_MAX_STATE_BYTES = 1 << 20
_LATEST = re.compile(r'^model_checkpoint_path: "([^"\\]{1,1000})"$', re.MULTILINE)
_VALUE_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Variables that are not weights, of tf.train.Checkpoint and Keras, of Estimators, and of BERT's own optimizer.
_OPTIMIZER = re.compile(
    r"(.*/\.OPTIMIZER_SLOT/.*|_?optimizer/.*|keras_api/.*|.*/(adam_[mv]|Adam(_1)?|Momentum|RMSProp(_1)?|Adagrad)"
    r"|save_counter|global_step|(.*/)?beta[12]_power|_CHECKPOINTABLE_OBJECT_GRAPH)",
    re.ASCII,
)


class TensorFlowCheckpoint(Format):
    """A directory with ``*.index`` and ``*.data-*``, or the index file of one of several checkpoints in a directory."""

    name = "a checkpoint of TensorFlow"

    def detect(self, path: Path) -> bool:
        if path.is_file():
            return _is_index_file(path)
        names = names_in(path)
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        return any(_has_data(name, names) and _is_index_file(path / name) for name in indexes)

    def open(self, path: Path) -> Source:
        """Describe the variables that do not belong to an optimizer. Links in the directory are not followed."""
        checkpoint = _Checkpoint(_index_of(path))
        model = {
            name: tensor
            for name, tensor in checkpoint.tensors.items()
            if not _OPTIMIZER.fullmatch(name)
        }
        num_others = len(checkpoint.tensors) - len(model)
        if not model:
            raise unusable(
                "there are no weights in this checkpoint", checkpoint.index, others_text(num_others)
            )
        notes, omitted = reports(num_others, checkpoint.num_values)
        root = checkpoint.index.parent
        return Source(root, root, model, notes=notes, omitted=omitted)

    def stored_tensors(self, path: Path) -> StoredTensors:
        checkpoint = _Checkpoint(_index_of(path))
        return StoredTensors(checkpoint.index.parent, checkpoint.tensors)


class _Checkpoint:
    """The content of one checkpoint: *tensors* by name, and the number of variables that are no tensors.

    Raises :class:`CheckpointUnusable` if the files are damaged, missing or links, or a variable is not stored whole.
    """

    def __init__(self, index: Path) -> None:
        self.index = index
        self.tensors: TensorDict = {}
        self.num_values = 0
        with faults_of(index, "this index of TensorFlow cannot be read"):
            num_shards, variables = read_index(
                read_safely(index.parent, index.name, limit=MAX_INDEX_BYTES)
            )
        prefix = index.name.removesuffix(INDEX_SUFFIX)
        ends: dict[str, int] = {}
        for variable in variables:
            file = f"{prefix}.data-{variable.shard:05d}-of-{num_shards:05d}"
            ends[file] = max(variable.offset + variable.nbytes, ends.get(file, 0))
            name = variable.name.removesuffix(_VALUE_SUFFIX)
            if variable.dtype is None:
                self.num_values += 1
                continue
            if name in self.tensors:
                raise unusable("two variables have the same name", index, name)
            self.tensors[name] = _tensor(name, variable, variable.dtype, file, index)
        for file, end in ends.items():
            path = index.parent / file
            try:
                check_regular_files(index.parent, [file])
                nbytes = os.lstat(path).st_size
            except OSError as error:
                raise unusable(
                    "a data file of this checkpoint cannot be read", path, error.strerror
                ) from error
            if end > nbytes:
                raise unusable(
                    "a data file is truncated", path, f"{nbytes} bytes, the index refers to {end}"
                )


def _tensor(name: str, variable: Variable, dtype: str, file: str, index: Path) -> Tensor:
    if variable.partitioned:
        raise unusable(
            "this checkpoint has a partitioned variable, which is not read",
            index,
            name,
            "load it with TensorFlow, without a partitioner, and save it again",
        )
    fault = shape_fault(variable.shape)
    nbytes = 0 if fault else nbytes_of(dtype, variable.shape)
    if fault is None and nbytes != variable.nbytes:
        fault = f"{variable.nbytes} bytes for {dtype} {list(variable.shape)}"
    if fault is not None:
        raise unusable(f"the variable {name[:200]!r} is described wrongly", index, fault)
    return whole_tensor(name, dtype, variable.shape, file, variable.offset)


# ---------------------------------------------------------------- files


def _index_of(path: Path) -> Path:
    """Return the index file of *path*: itself, or the newest checkpoint of a directory.

    Raises :class:`CheckpointUnusable` if the directory has several checkpoints and does not name the newest.
    """
    if path.is_file():
        return Path(os.path.realpath(path))
    names = names_in(path)
    found = [name for name in names if name.endswith(INDEX_SUFFIX) and _has_data(name, names)]
    if len(found) > 1:
        latest = _latest(path)
        if latest not in found:
            raise unusable(
                "there are several checkpoints of TensorFlow in this directory",
                path,
                ", ".join(found[:5]),
                "name one of the .index files",
            )
        found = [latest]
    return path / found[0]


def _latest(directory: Path) -> str:
    """Return the name of the index file of the newest checkpoint, from the text file ``checkpoint``; or ``""``."""
    try:
        text = read_safely(directory, _STATE_FILE, limit=_MAX_STATE_BYTES).decode()
    except (OSError, ValueError):
        return ""
    match = _LATEST.search(text)
    # An absolute path is valid on the machine that wrote it.
    return match[1].rpartition("/")[2] + INDEX_SUFFIX if match else ""


def _has_data(index: str, names: Iterable[str]) -> bool:
    prefix = index.removesuffix(INDEX_SUFFIX) + ".data-"
    return any(name.startswith(prefix) for name in names)


def _is_index_file(path: Path) -> bool:
    try:
        descriptor = open_regular(Path(os.path.realpath(path)))
    except OSError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        return is_index(os.pread(descriptor, FOOTER_BYTES, max(size - FOOTER_BYTES, 0)))
    finally:
        os.close(descriptor)
