"""Write a directory that PyTorch's ``dcp.load`` reads: ``__0_0.distcp`` and ``.metadata``, streamed. Imports no torch.

Each item of a ``.distcp`` file is an archive of ``torch.save``. ``.metadata`` is a pickle of a ``Metadata``: per name
the dtype, shape and chunks, and per chunk the file, offset and length of its item (source:
torch.distributed.checkpoint.metadata and .filesystem, torch 2.13). Its classes are written by name, so that the command
needs no torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.files.torch_archive_writing import (
    ArchiveTensor,
    write_torch_archive,
)

_META = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_FILE = "__0_0.distcp"
_VERSION = "1.0.0"
# Value of _MEM_FORMAT_ENCODING for a contiguous tensor.
_CONTIGUOUS = 0


class DcpWriter:
    """Writes the items of a state dict to *directory*, which exists, and then ``.metadata``.

    A context manager: :meth:`finish` must be called at the end of the block, else ``.metadata`` is missing and the
    directory is not a checkpoint. Every method can raise OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = (directory / _FILE).open("wb")
        self._described: dict[str, Any] = {}
        self._stored: dict[_Object, _Object] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def add_tensor(self, path: tuple[str | int, ...], tensor: ArchiveTensor) -> None:
        """Write a tensor as one chunk. *path* are its keys, and positions in lists, in the state dict of ``dcp.load``.

        Raises ValueError if another item has the same name.
        """
        offsets = (0,) * len(tensor.shape)
        properties = _Object(
            _Global(_META, "TensorProperties"),
            (_dtype(tensor.dtype), _LAYOUT, False, _MEMORY_FORMAT, False),
        )
        chunk = _Object(
            _Global(_META, "ChunkStorageMetadata"),
            {"offsets": _size(offsets), "sizes": _size(tensor.shape)},
        )
        described = _Object(
            _Global(_META, "TensorStorageMetadata"),
            {"properties": properties, "size": _size(tensor.shape), "chunks": [chunk]},
        )
        self._add(path, described, _size(offsets), tensor)

    def add_value(self, path: tuple[str | int, ...], value: Any) -> None:
        """Write a value that is not a tensor: plain data, which ``torch.load(weights_only=True)`` reads.

        Raises ValueError if another item has the same name.
        """
        self._add(path, _Object(_Global(_META, "BytesStorageMetadata"), {}), None, value)

    def finish(self) -> None:
        """Write ``.metadata``."""
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
        (self._directory / layout.DCP_METADATA).write_bytes(written.getvalue())

    def _add(self, path: tuple[str | int, ...], described: Any, offset: Any, content: Any) -> None:
        fqn = ".".join(map(str, path))
        if fqn in self._described:
            raise ValueError(f"two items have the name {fqn!r}")
        start = self._file.tell()
        write_torch_archive(self._file, content)
        length = self._file.tell() - start
        info = {"relative_path": _FILE, "offset": start, "length": length}
        index = _Object(
            _Global(_META, "MetadataIndex"), {"fqn": fqn, "offset": offset, "index": None}
        )
        self._described[fqn] = described
        self._stored[index] = _Object(_Global(_FILESYSTEM, "_StorageInfo"), info)
        self._paths[fqn] = path


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
