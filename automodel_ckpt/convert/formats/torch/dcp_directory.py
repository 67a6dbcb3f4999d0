"""The contents of a PyTorch DCP directory of another program: ``.metadata`` and the archives in the ``.distcp`` files.

Checkpoints of this program describe themselves in their manifest, and their ``.metadata`` is not read. Without a
manifest, ``.metadata`` is the only description. It is a pickle, so it is read as plain records
(``files/pickle_records.py``): nothing is imported, called or executed. There are no digests to check. Imports no torch.

Layout (source: torch.distributed.checkpoint.metadata and .filesystem, torch 2.13): ``.metadata`` pickles a ``Metadata``
with, per name, the tensor's dtype, shape and chunks; per chunk the file, offset and length of an item; and the path in
the nested state dict that a name was flattened from. An item is an archive of ``torch.save``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import CODES, DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.parts.slices import Box, Slice, Tensor, counts, nbytes_of
from automodel_ckpt.checkpoint.parts.tiling import shape_fault, tiling_fault
from automodel_ckpt.checkpoint.pickles.pickle_records import RECORD, Names, Record, read_records
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.torch.torch_objects import StoredView, describe_archive
from automodel_ckpt.errors import CheckpointUnusable

# Read, a pickle takes up to eighty times its size; a larger one must have data on the disk to describe.
_FREE_BYTES = 4 << 20
_MAX_BYTES = 1 << 29
_DATA_RATIO = 128
_MAX_DIMENSIONS = 64
_MAX_PATH = 64
# The limit of a tensor's pickle within an archive; a program of torch.save has some hundred bytes.
_MAX_PROGRAM_BYTES = 1 << 16
_META = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


def _nothing(*_: Any) -> None:
    """Replaces a call whose result is not needed (a path, a memory format)."""


def _pair(value: Any = ()) -> Any:
    return value


_METADATA_NAMES: Names = {
    **{
        f"{_META}.{name}": RECORD
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    "torch.distributed.checkpoint.filesystem._StorageInfo": RECORD,
    # Megatron-Core also stores the plan of each rank, which repeats the information of the tensors and chunks.
    **{f"{_PLANNER}.{name}": RECORD for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    f"{_PLANNER}.WriteItemType": _nothing,
    **{f"{_MEGATRON}.{name}": RECORD for name in ("MCoreSavePlan", "MCoreMetadata")},
    **{f"torch.{name}": code for name, code in CODES.items()},
    "torch.Size": _pair,
    "collections.OrderedDict": dict,
    "torch.serialization._get_layout": _nothing,
    f"{_META}._MEM_FORMAT_ENCODING": _nothing,
    # How some versions of Python pickle the member of an enumeration (the memory format).
    "builtins.getattr": _nothing,
    "__builtin__.getattr": _nothing,
    **{
        f"{module}.{name}": _nothing
        for module in ("pathlib", "pathlib._local")
        for name in (
            "Path",
            "PosixPath",
            "PurePath",
            "PurePosixPath",
            "WindowsPath",
            "PureWindowsPath",
        )
    },
}


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a ``.distcp`` file: *nbytes* at *start*."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as ``.metadata`` describes it: safetensors dtype code, global shape, and its chunks with their items."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Item], ...]


@dataclass(frozen=True, slots=True)
class DcpContent:
    """The content of ``.metadata``: tensors, the items of values that are not tensors, and paths.

    *paths* maps names to their path in the nested state dict that was saved, if it was nested.
    """

    tensors: Mapping[str, Described]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


def read_content(directory: Path) -> DcpContent:
    """Read ``.metadata`` of a DCP directory.

    Raises :class:`CheckpointUnusable` if it is missing, has an unknown form, or contradicts itself.
    """
    path = directory / layout.DCP_METADATA
    try:
        program = read_safely(directory, layout.DCP_METADATA, limit=_most_bytes(directory))
    except FileNotFoundError as error:
        what = "these .distcp files have no .metadata beside them"
        raise _unusable(what, path, "no such file") from error
    except OSError as error:
        raise _unusable("this .metadata cannot be read", path, repr(error)[:300]) from error
    return parse_content(program, path)


def max_metadata_bytes(nbytes_on_disk: int) -> int:
    """Return how many bytes ``.metadata`` may have, beside files of *nbytes_on_disk*."""
    return min(_MAX_BYTES, max(_FREE_BYTES, nbytes_on_disk // _DATA_RATIO))


def parse_content(program: bytes, path: Path) -> DcpContent:
    """Return the content of ``.metadata``, whose bytes are *program*; *path* is for errors.

    Raises :class:`CheckpointUnusable` if it has an unknown form, or contradicts itself.
    """
    try:
        value = read_records(program, _METADATA_NAMES)
        return _content(value, len(program))
    except Exception as error:  # a damaged pickle can make Python's reader raise anything
        reason = str(error) if isinstance(error, Fault) else repr(error)
        value = reason.split("\n")[0][:300]
        raise _unusable("this .metadata cannot be read", path, value) from error


def read_tensors(directory: Path, content: DcpContent) -> Iterator[Tensor]:
    """Yield the tensors, with the byte ranges of their raw bytes from the archive of each item.

    Raises :class:`CheckpointUnusable` for a tensor that its chunks do not tile, and for an item that is not a
    contiguous tensor of the described dtype and shape.
    """
    with _Mapped(directory) as files:
        for fqn, described in content.tensors.items():
            slices: list[Slice] = []
            for box, item in described.chunks:
                slices.append(_slice(fqn, described, box, item, files))
            fault = tiling_fault([stored.box for stored in slices], described.shape)
            if fault:
                what = f"the chunks of {fqn!r} do not make it up"
                raise _unusable(what, directory / layout.DCP_METADATA, fault)
            yield Tensor(fqn, described.dtype, described.shape, tuple(slices))


def read_values(directory: Path, items: Mapping[str, Item]) -> Iterator[tuple[str, Any]]:
    """Yield the values in *items* as descriptions (``torch_objects.py``), with their names.

    Each is an archive of ``torch.save``. Raises :class:`CheckpointUnusable` for an item that is damaged.
    """
    with _Mapped(directory) as files:
        for fqn, item in items.items():
            try:
                content = files.content(item.file)
                if item.start + item.nbytes > len(content):
                    raise Fault(f"the file has {len(content)} bytes, the item ends later")
                with (
                    memoryview(content) as everything,
                    everything[item.start : item.start + item.nbytes] as data,
                ):
                    archive = describe_archive(data)
            except Exception as error:  # a damaged archive can make its readers raise anything
                reason = str(error) if isinstance(error, Fault | OSError) else repr(error)
                what = f"the stored value {fqn[:200]!r} cannot be read"
                raise _unusable(what, files.path(item.file), reason[:300]) from error
            yield fqn, archive.value


# ---------------------------------------------------------------- .metadata


def _most_bytes(directory: Path) -> int:
    on_disk = 0
    for entry in os.scandir(directory):
        # Allocated blocks: a sparse file must not allow a larger pickle.
        on_disk += entry.stat(follow_symlinks=False).st_blocks * 512
    return max_metadata_bytes(on_disk)


def _content(value: Any, budget: int) -> DcpContent:
    """Convert the unpickled *value*. *budget* is the number of bytes of the program.

    Each described tensor or chunk takes at least one byte, unless the program refers to the same one again. A small
    program could do that to describe any number of them, so that is an error.
    """
    kinds = (f"{_META}.Metadata", f"{_MEGATRON}.MCoreMetadata")
    if type(value) is not Record or value.kind not in kinds:
        raise Fault("it is not a Metadata of PyTorch DCP")
    described = value.get("state_dict_metadata")
    stored = value.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise Fault("it lacks state_dict_metadata or storage_data")
    items = dict(_items(stored))
    tensors: dict[str, Described] = {}
    values: dict[str, Item] = {}
    for fqn, entry in described.items():
        if type(fqn) is not str or type(entry) is not Record:
            raise Fault("a name in it is not text, or what it names is not a description")
        if entry.kind.endswith(".BytesStorageMetadata"):
            budget -= 1
            item = items.get((fqn, None))
            if item is None:
                raise Fault(f"it does not state where the value {fqn[:200]!r} is stored")
            values[fqn] = item
        else:
            tensors[fqn] = _described(fqn, entry, items)
            budget -= 1 + len(tensors[fqn].chunks)
        if budget < 0:
            raise Fault("it describes more entries than it has bytes for")
    return DcpContent(tensors, values, dict(_paths(value.get("planner_data"))))


# The name of a tensor or value, and the offsets of the chunk; None for a value.
_Key = tuple[str, tuple[int, ...] | None]


def _items(stored: dict[Any, Any]) -> Iterator[tuple[_Key, Item]]:
    """Yield the items of ``storage_data``, with the name and offsets that refer to each."""
    for index, info in stored.items():
        if type(index) is not Record or type(info) is not Record:
            raise Fault("its storage_data is of another form")
        fqn = index.get("fqn")
        if type(fqn) is not str:
            raise Fault("its storage_data is of another form")
        if info.get("transform_descriptors"):
            raise Fault("its items are compressed or otherwise transformed")
        file = info.get("relative_path")
        start = info.get("offset")
        length = info.get("length")
        if type(file) is not str or counts([start, length]) is None:
            raise Fault("its storage_data is of another form")
        reason = layout.unsafe_path(file)
        if reason is not None:
            raise Fault(f"it names the file {file[:200]!r}: {reason}")
        offsets = index.get("offset")
        if offsets is not None:
            offsets = _extents(offsets)
        yield (fqn, offsets), Item(file, start, length)


def _described(fqn: str, entry: Record, items: Mapping[_Key, Item]) -> Described:
    dtype = _dtype(entry.get("properties"))
    chunks = entry.get("chunks")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS or type(chunks) is not list:
        raise Fault(f"the tensor {fqn[:200]!r} is not described in full")
    found = []
    for chunk in chunks:
        if type(chunk) is not Record:
            raise Fault(f"a chunk of {fqn[:200]!r} is not described")
        box = Box(_extents(chunk.get("offsets")), _extents(chunk.get("sizes")))
        item = items.get((fqn, box.offsets))
        if item is None:
            chunk_text = f"the chunk at {list(box.offsets)} of {fqn[:200]!r}"
            raise Fault(f"it does not state where {chunk_text} is stored")
        found.append((box, item))
    shape = _extents(entry.get("size"))
    # Checked here too, not only with the tiling: `ckpt show` adds up sizes without it.
    if fault := shape_fault(shape):
        raise Fault(f"the tensor {fqn[:200]!r}: {fault}")
    return Described(dtype, shape, tuple(found))


def _dtype(properties: Any) -> Any:
    """Return the dtype of TensorProperties, whose state is a tuple or, in older versions of torch, a mapping."""
    if type(properties) is not Record:
        return None
    if type(properties.state) is tuple and properties.state:
        return properties.state[0]
    return properties.get("dtype")


def _extents(value: Any) -> tuple[int, ...]:
    found = counts(value)
    if found is None or len(found) > _MAX_DIMENSIONS:
        raise Fault("a shape or an offset in it is not a list of counts")
    return found


def _paths(planner_data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield (name, path). Other planner data is ignored, as torch does."""
    if type(planner_data) is not dict:
        return
    for fqn, path in planner_data.items():
        if type(fqn) is not str or type(path) not in (tuple, list):
            continue
        if not 0 < len(path) <= _MAX_PATH:
            continue
        if all(type(part) in (str, int) for part in path):
            yield fqn, tuple(path)


# ---------------------------------------------------------------- items


class _Mapped:
    """The memory-mapped files of a directory. Only the pages that are accessed are read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        for content in self._maps.values():
            content.close()

    def path(self, file: str) -> Path:
        return self._directory / file

    def content(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            descriptor = open_safely(self._directory, file)
            try:
                self._maps[file] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        return self._maps[file]


def _slice(fqn: str, described: Described, box: Box, item: Item, files: _Mapped) -> Slice:
    """Return the slice of a chunk, whose raw bytes are in the archive *item*."""
    dtype = described.dtype
    try:
        start = item.start + _raw_start(files.content(item.file), item, dtype, box.sizes)
    except FileNotFoundError as error:
        what = "a file of tensors is missing: each node may have written its own"
        raise _unusable(what, files.path(item.file), "no such file") from error
    except Exception as error:  # a damaged archive can make its readers raise anything
        reason = str(error) if isinstance(error, Fault | OSError) else repr(error)
        what = f"the stored chunk at {list(box.offsets)} of {fqn!r} does not match .metadata"
        raise _unusable(what, files.path(item.file), reason[:300]) from error
    nbytes = nbytes_of(dtype, box.sizes)
    return Slice(fqn, dtype, box.offsets, box.sizes, item.file, start, nbytes)


def _raw_start(content: mmap.mmap, item: Item, dtype: str, sizes: tuple[int, ...]) -> int:
    """Return the offset in an item at which the tensor's row-major bytes begin."""
    stop = item.start + item.nbytes
    # A slice of a memoryview beyond its end is shorter, without an error.
    if stop > len(content):
        raise Fault(f"the file has {len(content)} bytes, the item ends at {stop}")
    # The views must be released before the map can be closed.
    with memoryview(content) as everything, everything[item.start : stop] as data:
        archive = describe_archive(data, max_program_bytes=_MAX_PROGRAM_BYTES)
    view = archive.value
    if not isinstance(view, StoredView):
        raise Fault("it is not a plain tensor")
    if view.dtype != dtype:
        raise Fault(f"it is a tensor of another dtype than {dtype}")
    if view.shape != sizes or view.offset != 0:
        raise Fault("it is a tensor of another shape, or a view into a larger one")
    if view.num_outer_dimensions > 0:
        why = "it was saved transposed, or as channels_last"
        raise Fault(f"its elements are not in row-major order ({why})")
    begin, end = archive.storages.get(view.key, (0, 0))
    if end - begin != nbytes_of(dtype, sizes):
        raise Fault(f"its record has {end - begin} bytes, not {nbytes_of(dtype, sizes)}")
    return begin


def _unusable(what: str, where: Path, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(
        what,
        where=str(where),
        value=value,
        hint="take the files from another copy, or export them with PyTorch",
    )
