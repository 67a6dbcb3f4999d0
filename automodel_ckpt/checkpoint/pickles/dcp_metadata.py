"""The pickle in the ``.metadata`` of PyTorch DCP, written without torch: its classes are named, not imported.

It is a ``Metadata``: per name the dtype, shape and chunks; per chunk the file, offset and length of its item; and the
keys that lead to each name in the nested state dict (source: torch.distributed.checkpoint.metadata and .filesystem,
torch 2.13).

The instructions are assembled here, because Python's pickler needs several objects for each chunk, and a checkpoint can
have millions of chunks. Classes, texts and extents are built once, and referred to by their number in the memo. What
describes a chunk thus consists of fixed instructions and numbers of a fixed length: an array that NumPy fills.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Shape
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import pickled

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value in a nested state dict; joined by dots, they are its flat name."""

_META = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
# Value of _MEM_FORMAT_ENCODING for a contiguous tensor.
_CONTIGUOUS = 0
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ
_MAX_INT32 = 2**31 - 1


class DcpLocation(NamedTuple):
    """Where an item is: a file next to ``.metadata``, and its first byte and length in it."""

    file: str
    start: int
    nbytes: int


class Columns(NamedTuple):
    """The chunks of a tensor as arrays: the positions of their first elements and their shapes (chunks x dimensions),
    the numbers of their files (:meth:`DcpMetadata.file_number`), and the first bytes and lengths of their items."""

    offsets: Any
    sizes: Any
    files: Any
    starts: Any
    nbytes: Any


def flat_name(path: KeyPath) -> str:
    """Return the name of the value that *path* leads to."""
    return ".".join(str(key) for key in path)


class DcpMetadata:
    """Collects the items of a directory. Raises ValueError if two items have the same name."""

    def __init__(self) -> None:
        self._memo = _Memo()
        self._forms: dict[tuple[Any, ...], tuple[bytes, Any]] = {}
        self._described: FileDict = {}
        self._paths: list[bytes] = []
        self._stored: list[bytes] = []
        self._values: list[tuple[int, DcpLocation]] = []

    def file_number(self, name: str) -> int:
        """Return the number of a file next to ``.metadata`` in :class:`Columns`."""
        return self._memo.text(name)

    def add_tensor(self, path: KeyPath, dtype: str, shape: Shape, location: DcpLocation) -> None:
        """Add a tensor of a safetensors *dtype*, stored as one chunk."""
        sizes = np.array([shape], np.int64).reshape(1, len(shape))
        columns = Columns(np.zeros_like(sizes), sizes, *self._items([location]))
        self.add_columns(path, dtype, shape, columns)

    def add_columns(self, path: KeyPath, dtype: str, shape: Shape, columns: Columns) -> None:
        """Add a tensor of a safetensors *dtype*, stored in chunks, which cover it."""
        # Tensors that are divided in the same way are described once.
        form = (dtype, shape, columns.offsets.tobytes(), columns.sizes.tobytes())
        if form not in self._forms:
            self._forms[form] = self._form(dtype, shape, columns)
        described, offsets = self._forms[form]
        names = np.full(len(offsets), self._add(path, described), "<u4")
        self._stored.append(self._storage_rows(names, offsets, *columns[2:]))

    def add_value(self, path: KeyPath, location: DcpLocation) -> None:
        """Add a value that is not a tensor."""
        name = self._add(path, self._memo.new("BytesStorageMetadata") + _BUILT)
        self._values.append((name, location))

    def to_bytes(self) -> bytes:
        """Return the content of ``.metadata``."""
        memo = self._memo
        names = np.array([name for name, _ in self._values], "<u4")
        items = self._items([location for _, location in self._values])
        values = self._storage_rows(names, None, *items)
        parts = [
            memo.new("Metadata"),
            memo.attribute("state_dict_metadata", _dictionary(self._described.values())),
            memo.attribute("planner_data", _dictionary(self._paths)),
            memo.attribute("storage_data", _dictionary([*self._stored, values])),
            memo.attribute("storage_meta", self._storage_meta()),
            memo.attribute("version", _get(memo.text(_VERSION))),
            _BUILT,
            pickle.STOP,
        ]
        # After the parts, which add to it.
        return b"".join([memo.written, *parts])

    def _items(self, locations: Sequence[DcpLocation]) -> list[Any]:
        """Return *locations* as arrays: numbers of files, first bytes and lengths."""
        rows = [(self.file_number(file), start, nbytes) for file, start, nbytes in locations]
        return list(np.array(rows, np.int64).reshape(len(rows), 3).T)

    def _add(self, path: KeyPath, described: bytes) -> int:
        """Add the description of an item; return the number of its name."""
        name = flat_name(path)
        if name in self._described:
            raise ValueError(f"two items have the name {name!r}")
        number = self._memo.text(name)
        self._described[name] = _get(number) + described
        keys = b"".join(map(self._key, path))
        self._paths.append(_get(number) + pickle.MARK + keys + pickle.TUPLE)
        return number

    def _key(self, key: object) -> bytes:
        if type(key) is str:
            return _get(self._memo.text(key))
        return pickled(key)

    def _form(self, dtype: str, shape: Shape, columns: Columns) -> tuple[bytes, Any]:
        """Return the description of a tensor, and the numbers of the offsets of its chunks."""
        memo = self._memo
        offsets = memo.all_extents(columns.offsets)
        chunks = _rows(
            memo.new("ChunkStorageMetadata") + memo.key("offsets") + pickle.LONG_BINGET,
            offsets,
            memo.key("sizes") + pickle.LONG_BINGET,
            memo.all_extents(columns.sizes),
            _BUILT,
        )
        described = [
            memo.new("TensorStorageMetadata"),
            memo.attribute("properties", self._properties_of(dtype)),
            memo.attribute("size", _get(memo.extents(shape))),
            memo.attribute("chunks", pickle.EMPTY_LIST + pickle.MARK + chunks + pickle.APPENDS),
            _BUILT,
        ]
        return b"".join(described), offsets

    def _properties_of(self, dtype: str) -> bytes:
        memo = self._memo
        layout = memo.call("torch.serialization", "_get_layout", _get(memo.text("torch.strided")))
        memory_format = memo.call(_META, "_MEM_FORMAT_ENCODING", pickled(_CONTIGUOUS))
        state = [
            _get(memo.named("torch", TORCH_NAMES[dtype])),
            layout,
            pickle.NEWFALSE,  # requires_grad
            memory_format,
            pickle.NEWFALSE,  # pin_memory
        ]
        new = _get(memo.named(_META, "TensorProperties")) + _NEW
        return b"".join([new, pickle.MARK, *state, pickle.TUPLE, pickle.BUILD])

    def _storage_rows(
        self, names: Any, offsets: Any, files: Any, starts: Any, nbytes: Any
    ) -> bytes:
        """Return the keys and values of ``storage_data``; *offsets* is None for values that are not tensors."""
        memo = self._memo
        at = [pickle.NONE] if offsets is None else [pickle.LONG_BINGET, offsets]
        return _rows(
            memo.new("MetadataIndex") + memo.key("fqn") + pickle.LONG_BINGET,
            names,
            memo.key("offset"),
            *at,
            memo.key("index") + pickle.NONE + _BUILT,
            memo.new("_StorageInfo", _FILESYSTEM) + memo.key("relative_path") + pickle.LONG_BINGET,
            files.astype("<u4"),
            memo.key("offset"),
            *_integers(starts),
            memo.key("length"),
            *_integers(nbytes),
            _BUILT,
        )

    def _storage_meta(self) -> bytes:
        # torch's own writer stores the path of the directory, which may be moved.
        memo = self._memo
        empty = [
            memo.attribute(name, pickle.NONE) for name in ("checkpoint_id", "save_id", "load_id")
        ]
        modules = memo.attribute("modules", pickle.EMPTY_LIST)
        return b"".join([memo.new("StorageMeta"), *empty, modules, _BUILT])


# ---------------------------------------------------------------- the pickle

# The end of what `_Memo.new` begins.
_BUILT = pickle.SETITEMS + pickle.BUILD
# The names in every chunk come first: a number below 256 takes two bytes, any other takes five.
_FREQUENT = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
_FREQUENT_CLASSES = ("ChunkStorageMetadata", "MetadataIndex", "TensorStorageMetadata")


class _Memo:
    """The values that the pickle builds first and then refers to by their number; *written* are the instructions."""

    def __init__(self) -> None:
        self.written = bytearray(pickle.PROTO + b"\x04")
        self._count = 0
        self._texts: dict[str, int] = {}
        self._named: dict[tuple[str, str], int] = {}
        self._extents: dict[Shape, int] = {}
        for name in _FREQUENT:
            self.text(name)
        for name in _FREQUENT_CLASSES:
            self.named(_META, name)
        self.named(_FILESYSTEM, "_StorageInfo")

    def text(self, value: str) -> int:
        """Return the number of a text."""
        number = self._texts.get(value)
        if number is None:
            number = self._texts[value] = self._keep(pickled(value))
        return number

    def named(self, module: str, name: str) -> int:
        """Return the number of a class, a function or a dtype."""
        if (module, name) not in self._named:
            words = _get(self.text(module)) + _get(self.text(name))
            self._named[module, name] = self._keep(words + pickle.STACK_GLOBAL)
        return self._named[module, name]

    def extents(self, value: Shape) -> int:
        """Return the number of a ``torch.Size``."""
        number = self._extents.get(value)
        if number is None:
            items = b"".join(map(pickled, value))
            size = self.call("torch", "Size", pickle.MARK + items + pickle.TUPLE)
            number = self._extents[value] = self._keep(size)
        return number

    def all_extents(self, values: Any) -> Any:
        """Return the numbers of the rows of an array, as an array."""
        return np.array([self.extents(tuple(row)) for row in values.tolist()], "<u4")

    def call(self, module: str, name: str, argument: bytes) -> bytes:
        """Return the instructions that call a function with one argument."""
        return _get(self.named(module, name)) + argument + pickle.TUPLE1 + pickle.REDUCE

    def new(self, name: str, module: str = _META) -> bytes:
        """Return the instructions that begin an object; its attributes follow, and then ``_BUILT``."""
        return _get(self.named(module, name)) + _NEW + pickle.EMPTY_DICT + pickle.MARK

    def key(self, name: str) -> bytes:
        """Return the instruction for the name of an attribute. Its value follows."""
        return _get(self.text(name))

    def attribute(self, name: str, value: bytes) -> bytes:
        """Return the instructions for an attribute."""
        return self.key(name) + value

    def _keep(self, instructions: bytes) -> int:
        self.written += instructions + pickle.MEMOIZE + pickle.POP
        self._count += 1
        return self._count - 1


def _get(number: int) -> bytes:
    if number < 256:
        return pickle.BINGET + bytes([number])
    return pickle.LONG_BINGET + struct.pack("<I", number)


def _dictionary(items: Iterable[bytes]) -> bytes:
    return b"".join([pickle.EMPTY_DICT, pickle.MARK, *items, pickle.SETITEMS])


def _integers(values: Any) -> tuple[bytes, Any]:
    """Return the instruction that reads integers, and its operands: of four bytes each where that suffices."""
    if len(values) == 0 or int(values.max()) <= _MAX_INT32:
        return pickle.BININT, values.astype("<i4")
    return pickle.LONG1 + b"\x08", values.astype("<i8")


def _rows(*columns: Any) -> bytes:
    """Return rows of the same instructions (bytes) with different operands (arrays of little-endian integers)."""
    (num_rows,) = {len(column) for column in columns if not isinstance(column, bytes)}
    fields = []
    for number, column in enumerate(columns):
        kind = f"V{len(column)}" if isinstance(column, bytes) else column.dtype.str
        fields.append((f"{number}", kind))
    rows = np.empty(num_rows, fields)
    for number, column in enumerate(columns):
        rows[f"{number}"] = np.void(column) if isinstance(column, bytes) else column
    return rows.tobytes()
