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

import io
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import others_text
from automodel_ckpt.checkpoint.files.safe_open import open_regular, read_safely, without_links
from automodel_ckpt.checkpoint.parts.slices import (
    Tensor,
    TensorDict,
    nbytes_of,
    shape_fault,
    whole_tensor,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    faults_of,
    names_in,
    omitted_texts,
)
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.errors import unusable

FOOTER_BYTES = 48
MAX_INDEX_BYTES = 64 << 20
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_TRAILER_BYTES = 5
_MAX_ENTRIES = 200_000
_MAX_KEY_BYTES = 4096
# The keys of a block share prefixes, so that a small file could describe long names.
_MAX_ALL_KEYS_BYTES = 32 << 20
_MAX_DIMENSIONS = 64
_MAX_SHARDS = 1 << 16
_CRC_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78
# Numbers of the enumeration DataType (tensorflow/core/framework/types.proto), as codes of the safetensors format.
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
# Text and variants have no fixed size.
_VALUES = (7, 21)
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
        return any(_is_index_file(path / name) for name in _indexes_in(path))

    def open(self, path: Path) -> Source:
        """Describe the variables that do not belong to an optimizer. Links in the directory are not followed."""
        index = _index_of(path)
        tensors, num_values = _read(index)
        model = {name: each for name, each in tensors.items() if not _OPTIMIZER.fullmatch(name)}
        num_others = len(tensors) - len(model)
        if not model:
            raise unusable(
                "there are no weights in this checkpoint", index, others_text(num_others)
            )
        omitted = omitted_texts(num_others, num_values)
        return Source(index.parent, index.parent, model, omitted=omitted)

    def stored_tensors(self, path: Path) -> StoredTensors:
        index = _index_of(path)
        return StoredTensors(index.parent, _read(index)[0])


def _read(index: Path) -> tuple[TensorDict, int]:
    """Return the tensors of one checkpoint, and the number of its variables that are no tensors.

    Raises :class:`CheckpointUnusable` if the files are damaged, missing or links, or a variable is not stored whole.
    """
    prefix = index.name.removesuffix(INDEX_SUFFIX)
    ends: dict[str, int] = {}
    tensors = {}
    with faults_of(index, "this index of TensorFlow cannot be read"):
        content = read_safely(index.parent, index.name, limit=MAX_INDEX_BYTES)
        num_shards, variables = read_index(content)
        for key, variable in variables.items():
            # Of BundleEntryProto: dtype, shape, number and offset in the data file, and size.
            number, _, shard, offset, nbytes = (variable.get(field, 0) for field in range(1, 6))
            file = f"{prefix}.data-{shard:05d}-of-{num_shards:05d}"
            ends[file] = max(offset + nbytes, ends.get(file, 0))
            if number not in _VALUES:
                name = key.removesuffix(_VALUE_SUFFIX)
                if name in tensors:
                    raise Fault(f"two variables have the name {name[:200]!r}")
                tensors[name] = _tensor(name, variable, file, index)
    for file, end in ends.items():
        with faults_of(index.parent / file, "a data file of this checkpoint cannot be read"):
            check_regular_files(index.parent, [file])
            num_bytes = os.lstat(index.parent / file).st_size
            if end > num_bytes:
                raise Fault(f"it is truncated: {num_bytes} bytes, the index refers to {end}")
    return tensors, len(variables) - len(tensors)


def _tensor(name: str, variable: Mapping[int, Any], file: str, index: Path) -> Tensor:
    if 7 in variable:
        raise unusable(
            "this checkpoint has a partitioned variable, which is not read",
            index,
            name,
            "load it with TensorFlow, without a partitioner, and save it again",
        )
    with faults_of(index, f"the variable {name[:200]!r} is described wrongly"):
        number, described = variable.get(1, 0), variable.get(2, b"")
        # A dimension of 0 is not written: it is the default of the field. An unknown dtype is a KeyError.
        dimensions = [dict(_fields(each)) for field, each in _fields(described) if field == 2]
        shape = tuple(each.get(1, 0) for each in dimensions)
        # A negative number, for an unknown dimension, has all its 64 bits.
        if len(shape) > _MAX_DIMENSIONS or any(extent >= 1 << 63 for extent in shape):
            raise Fault(f"its shape is not known, or has {len(shape)} dimensions")
        fault, nbytes, dtype = shape_fault(shape), variable.get(5, 0), _DTYPES[number]
        if fault or nbytes_of(dtype, shape) != nbytes:
            raise Fault(fault or f"{nbytes} bytes for {dtype} {list(shape)}")
        return whole_tensor(name, dtype, shape, file, variable.get(4, 0))


# ---------------------------------------------------------------- the table


def read_index(data: bytes) -> tuple[int, dict[str, dict[int, Any]]]:
    """Return the number of data files, and the fields of each variable by its name in the index *data*.

    Raises :class:`Fault`, or any exception for a damaged index.
    """
    header = {}
    variables = {}
    for key, value in _table(data):
        if key == b"":
            header = dict(_fields(value))
        # Others begin a part of a partitioned variable, which has an entry under its name too.
        elif key[:1] != b"\0":
            name = key.decode()
            if not name.isprintable():
                raise Fault(f"a name in it is not printable: {name[:100]!r}")
            variables[name] = dict(_fields(value))
    if header.get(2, 0) != 0:
        raise Fault("it was written on a machine of the other byte order")
    if not 0 < header.get(1, 0) <= _MAX_SHARDS:
        raise Fault("it does not state the number of data files")
    return header[1], variables


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table, which are in the order of their keys."""
    if not data[-FOOTER_BYTES:].endswith(_MAGIC):
        raise Fault("its end is missing: it is truncated, or no index")
    footer = io.BytesIO(data[-FOOTER_BYTES:-8])
    # The block with metadata is empty. Reading it compares its checksum, so that every byte of the index is covered.
    _block(data, footer)
    last_key = None
    num_entries = 0
    keys_bytes = 0
    for _, value in _entries(_block(data, footer)):
        for key, content in _entries(_block(data, io.BytesIO(value))):
            # The order also makes sure that no block is listed twice.
            if last_key is not None and key <= last_key:
                raise Fault("its keys are not in order")
            last_key = key
            num_entries += 1
            keys_bytes += len(key)
            if num_entries > _MAX_ENTRIES or keys_bytes > _MAX_ALL_KEYS_BYTES:
                raise Fault("it has more entries than a model")
            yield key, content


def _block(data: bytes, handle: io.BytesIO) -> bytes:
    """Return the block at the offset and of the size in *handle*."""
    offset = _varint(handle)
    end = offset + _varint(handle)
    if end + _TRAILER_BYTES > len(data):
        raise Fault("one of its blocks is not in the file")
    if data[end] != 0:
        raise Fault(f"it is compressed (kind {data[end]}), which TensorFlow does not do")
    (stored,) = struct.unpack_from("<I", data, end + 1)
    if stored != _masked_crc(data[offset : end + 1]):
        raise Fault("the checksum of one of its blocks is wrong")
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    (num_restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (num_restarts + 1)
    if end < 0:
        raise Fault("one of its blocks is too short")
    content = io.BytesIO(block[:end])
    key = b""
    while content.tell() < end:
        shared, num_new, value_bytes = (_varint(content) for _ in range(3))
        if shared > len(key) or shared + num_new > _MAX_KEY_BYTES:
            raise Fault("the length of a name is wrong")
        key = key[:shared] + _take(content, num_new)
        yield key, _take(content, value_bytes)


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


def _take(content: io.BytesIO, num_bytes: int) -> bytes:
    taken = content.read(num_bytes)
    if len(taken) < num_bytes:
        raise Fault("an entry of it is truncated")
    return taken


def _varint(content: io.BytesIO) -> int:
    """Read a number of up to 64 bits, seven bits in a byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        (byte,) = _take(content, 1)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise Fault("a number in it is too long")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a message: an integer or bytes."""
    content = io.BytesIO(data)
    while content.tell() < len(data):
        field, kind = divmod(_varint(content), 8)
        if kind == 0:
            yield field, _varint(content)
        elif kind in (1, 5):
            yield field, int.from_bytes(_take(content, 8 if kind == 1 else 4), "little")
        elif kind == 2:
            yield field, _take(content, _varint(content))
        else:
            raise Fault("an entry of it is no protocol buffer")


# ---------------------------------------------------------------- files


def _index_of(path: Path) -> Path:
    """Return the index file of *path*: itself, or the newest checkpoint of a directory.

    Raises :class:`CheckpointUnusable` if the directory has several checkpoints and does not name the newest.
    """
    if path.is_file():
        return without_links(path)
    found = _indexes_in(path)
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


def _indexes_in(directory: Path) -> list[str]:
    """Return the names of the index files that have data files."""
    names = names_in(directory)
    prefixes = {name.partition(".data-")[0] for name in names if ".data-" in name}
    return [name for name in names if name.removesuffix(INDEX_SUFFIX) in prefixes - {name}]


def _is_index_file(path: Path) -> bool:
    with suppress(OSError), os.fdopen(open_regular(without_links(path)), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - len(_MAGIC), 0))
        return file.read() == _MAGIC
    return False
