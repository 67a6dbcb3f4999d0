"""The pickle in the ``.metadata`` of PyTorch DCP, written without torch: its classes are named, not imported.

It is a ``Metadata``: per name the dtype, shape and chunks; per chunk the file, offset and length of its item; and the
keys that lead to each name in the nested state dict (source: torch.distributed.checkpoint.metadata and .filesystem,
torch 2.13).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from automodel_ckpt.checkpoint.dtypes import TORCH_NAMES

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value in a nested state dict; joined by dots, they are its flat name."""

_META = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
# Value of _MEM_FORMAT_ENCODING for a contiguous tensor.
_CONTIGUOUS = 0


class DcpLocation(NamedTuple):
    """Where an item is: a file beside ``.metadata``, and its first byte and length in it."""

    file: str
    start: int
    nbytes: int


class DcpChunk(NamedTuple):
    """A part of a tensor: the position of its first element, its shape, and its item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: DcpLocation


def flat_name(path: KeyPath) -> str:
    """Return the name of the value that *path* leads to."""
    return ".".join(str(key) for key in path)


class DcpMetadata:
    """Collects the items of a directory. Raises ValueError if two have the same name."""

    def __init__(self) -> None:
        self._described: dict[str, Any] = {}
        self._stored: dict[_Object, _Object] = {}
        self._paths: dict[str, KeyPath] = {}

    def add_tensor(
        self, path: KeyPath, dtype: str, shape: tuple[int, ...], chunks: Sequence[DcpChunk]
    ) -> None:
        """Add a tensor of a safetensors *dtype*, stored in *chunks*, which cover it."""
        properties = _Object(
            _Global(_META, "TensorProperties"),
            (_dtype(dtype), _LAYOUT, False, _MEMORY_FORMAT, False),
        )
        parts: list[_Object] = []
        for chunk in chunks:
            extent = {"offsets": _size(chunk.offsets), "sizes": _size(chunk.sizes)}
            parts.append(_Object(_Global(_META, "ChunkStorageMetadata"), extent))
        described = _Object(
            _Global(_META, "TensorStorageMetadata"),
            {"properties": properties, "size": _size(shape), "chunks": parts},
        )
        name = self._add(path, described)
        for chunk in chunks:
            self._locate(name, _size(chunk.offsets), chunk.location)

    def add_value(self, path: KeyPath, location: DcpLocation) -> None:
        """Add a value that is not a tensor."""
        name = self._add(path, _Object(_Global(_META, "BytesStorageMetadata"), {}))
        self._locate(name, None, location)

    def to_bytes(self) -> bytes:
        """Return the content of ``.metadata``."""
        metadata = _Object(
            _Global(_META, "Metadata"),
            {
                "state_dict_metadata": self._described,
                "planner_data": self._paths,
                "storage_data": self._stored,
                "storage_meta": _Object(_Global(_META, "StorageMeta"), {}),
                "version": _VERSION,
            },
        )
        written = io.BytesIO()
        _Pickler(written, protocol=4).dump(metadata)
        return written.getvalue()

    def check_is_new(self, path: KeyPath) -> None:
        """Raise ValueError if an item has this name."""
        name = flat_name(path)
        if name in self._described:
            raise ValueError(f"two items have the name {name!r}")

    def _add(self, path: KeyPath, described: _Object) -> str:
        self.check_is_new(path)
        name = flat_name(path)
        self._described[name] = described
        self._paths[name] = path
        return name

    def _locate(self, name: str, offset: _Call | None, location: DcpLocation) -> None:
        index = _Object(
            _Global(_META, "MetadataIndex"), {"fqn": name, "offset": offset, "index": None}
        )
        info = {
            "relative_path": location.file,
            "offset": location.start,
            "length": location.nbytes,
        }
        self._stored[index] = _Object(_Global(_FILESYSTEM, "_StorageInfo"), info)


# ---------------------------------------------------------------- the pickle


@dataclass(frozen=True)
class _Global:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class _Object:
    """An object that is made without a call of ``__init__``, and then gets *state*, as dataclasses are pickled."""

    kind: _Global
    state: Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Call:
    """The result of a call."""

    function: _Global
    arguments: tuple[Any, ...]


_LAYOUT = _Call(_Global("torch.serialization", "_get_layout"), ("torch.strided",))
_MEMORY_FORMAT = _Call(_Global(_META, "_MEM_FORMAT_ENCODING"), (_CONTIGUOUS,))


def _dtype(code: str) -> _Global:
    return _Global("torch", TORCH_NAMES[code])


def _size(extents: tuple[int, ...]) -> _Call:
    return _Call(_Global("torch", "Size"), (extents,))


# Python's own implementation: only it can be extended by instructions that name classes without importing them. The
# type stubs do not describe it.
_PythonPickler: Any = pickle._Pickler


class _Pickler(_PythonPickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[Any, Any]] = dict(_PythonPickler.dispatch)

    def save_named(self, value: _Global) -> None:
        """Write the name of a class or function."""
        self.save(value.module)
        self.save(value.name)
        self.write(pickle.STACK_GLOBAL)

    def save_object(self, value: _Object) -> None:
        """Write an object and its state."""
        self.save(value.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        # An empty state too: a frozen dataclass without fields has none, and BUILD accepts {}.
        self.save(dict(value.state) if isinstance(value.state, Mapping) else value.state)
        self.write(pickle.BUILD)

    def save_call(self, value: _Call) -> None:
        """Write a call."""
        self.save(value.function)
        self.save(value.arguments)
        self.write(pickle.REDUCE)


_Pickler.dispatch[_Global] = _Pickler.save_named
_Pickler.dispatch[_Object] = _Pickler.save_object
_Pickler.dispatch[_Call] = _Pickler.save_call
