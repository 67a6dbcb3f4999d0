"""The contents of a PyTorch DCP directory of another program: ``.metadata`` and the archives in the ``.distcp`` files.

Checkpoints of this program describe themselves in their manifest, and their ``.metadata`` is not read. Without a
manifest, ``.metadata`` is the only description. It is a pickle, so it is read as a description (``torch_objects.py``):
nothing is imported, called or executed. There are no digests to check. Imports no torch.

Layout (source: torch.distributed.checkpoint.metadata and .filesystem, torch 2.13): ``.metadata`` pickles a ``Metadata``
with, per name, the tensor's dtype, shape and chunks; per chunk the file, offset and length of an item; and the path in
the nested state dict that a name was flattened from. An item is an archive of ``torch.save``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    Tensor,
    counts,
    nbytes_of,
    shape_fault,
)
from automodel_ckpt.checkpoint.pickles.dcp_metadata import DcpLocation
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of, tiled
from automodel_ckpt.convert.formats.torch.torch_objects import (
    Archive,
    Opaque,
    StoredView,
    describe_file,
    describe_pickle,
)

# Read, a pickle takes up to eighty times its size; a larger one must have data on the disk to describe.
_FREE_BYTES = 4 << 20
_MAX_BYTES = 1 << 29
_DATA_RATIO = 128
_MAX_DIMENSIONS = 64
_MAX_PATH = 64
# The limit of a tensor's pickle within an archive; a program of torch.save has some hundred bytes.
_MAX_PROGRAM_BYTES = 1 << 16
_META = "torch.distributed.checkpoint.metadata"

# Megatron-Core has its own class, with the same attributes and others.
_KINDS = (
    f"{_META}.Metadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
)


@dataclass(frozen=True)
class Described:
    """A tensor as ``.metadata`` describes it: safetensors dtype code, global shape, and its chunks with their items."""

    dtype: str
    shape: Shape
    chunks: tuple[tuple[Box, DcpLocation], ...]


@dataclass(frozen=True)
class DcpContent:
    """The content of ``.metadata``: tensors, the items of values that are not tensors, and paths.

    *paths* maps names to their path in the nested state dict that was saved, if it was nested.
    """

    tensors: Mapping[str, Described]
    values: Mapping[str, DcpLocation]
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


def read_content(directory: Path) -> DcpContent:
    """Read ``.metadata`` of a DCP directory.

    Raises :class:`CheckpointUnusable` if it is missing, has an unknown form, or contradicts itself.
    """
    with faults_of(directory / layout.DCP_METADATA, "this .metadata cannot be read"):
        # Allocated blocks: a sparse file must not allow a larger pickle.
        on_disk = sum(
            entry.stat(follow_symlinks=False).st_blocks for entry in os.scandir(directory)
        )
        limit = min(_MAX_BYTES, max(_FREE_BYTES, on_disk * 512 // _DATA_RATIO))
        program = read_safely(directory, layout.DCP_METADATA, limit=limit)
        return _content(describe_pickle(program), len(program))


def read_tensors(directory: Path, content: DcpContent) -> Iterator[Tensor]:
    """Yield the tensors, with the byte ranges of their raw bytes from the archive of each item.

    Raises :class:`CheckpointUnusable` for a tensor that its chunks do not tile, and for an item that is not a
    contiguous tensor of the described dtype and shape.
    """
    for fqn, described in content.tensors.items():
        dtype, slices = described.dtype, []
        for box, item in described.chunks:
            what = (
                f"the stored chunk at {list(box.offsets)} of {fqn[:200]!r} does not match .metadata"
            )
            with faults_of(directory / item.file, what):
                start = _raw_start(_archive(directory, item, _MAX_PROGRAM_BYTES), dtype, box.sizes)
            nbytes = nbytes_of(dtype, box.sizes)
            slices.append(Slice(fqn, dtype, box.offsets, box.sizes, item.file, start, nbytes))
        yield tiled(fqn, dtype, described.shape, slices, directory / layout.DCP_METADATA)


def read_values(directory: Path, items: Mapping[str, DcpLocation]) -> Iterator[tuple[str, Any]]:
    """Yield the values in *items* as descriptions (``torch_objects.py``), with their names.

    Each is an archive of ``torch.save``. Raises :class:`CheckpointUnusable` for an item that is damaged.
    """
    for fqn, item in items.items():
        what = f"the stored value {fqn[:200]!r} cannot be read"
        with faults_of(directory / item.file, what):
            value = _archive(directory, item, None).value
        yield fqn, value


# ---------------------------------------------------------------- .metadata


def _content(value: Any, budget: int) -> DcpContent:
    """Convert the unpickled *value*. *budget* is the number of bytes of the program.

    Each described tensor or chunk takes at least one byte, unless the program refers to the same one again. A small
    program could do that to describe any number of them, so that is an error. Other damage raises any exception.
    """
    if not isinstance(value, Opaque) or value.kind not in _KINDS:
        raise Fault("it is not a Metadata of PyTorch DCP")
    items = dict(_items(value.get("storage_data")))
    tensors = {}
    values = {}
    for fqn, entry in value.get("state_dict_metadata").items():
        if type(fqn) is not str:
            raise Fault("a name in it is not text")
        budget -= 1
        if entry.kind.endswith(".BytesStorageMetadata"):
            values[fqn] = items[fqn, None]
        else:
            tensors[fqn] = _described(fqn, entry, items)
            budget -= len(tensors[fqn].chunks)
        if budget < 0:
            raise Fault("it describes more entries than it has bytes for")
    return DcpContent(tensors, values, dict(_paths(value.get("planner_data"))))


# The name of a tensor or value, and the offsets of the chunk; None for a value.
_Key = tuple[str, Shape | None]


def _items(stored: Mapping[Any, Any]) -> Iterator[tuple[_Key, DcpLocation]]:
    """Yield the items of ``storage_data``, with the name and offsets that refer to each."""
    for index, info in stored.items():
        if info.get("transform_descriptors"):
            raise Fault("its items are compressed or otherwise transformed")
        file, offsets = info.get("relative_path"), index.get("offset")
        start, nbytes = _extents([info.get("offset"), info.get("length")])
        reason = layout.unsafe_path(file)
        if reason is not None:
            raise Fault(f"it names the file {file[:200]!r}: {reason}")
        chunk = None if offsets is None else _extents(offsets)
        yield (index.get("fqn"), chunk), DcpLocation(file, start, nbytes)


def _described(fqn: str, entry: Opaque, items: Mapping[_Key, DcpLocation]) -> Described:
    dtype = _dtype(entry.get("properties"))
    if dtype not in DTYPE_BITS:
        raise Fault(f"the tensor {fqn[:200]!r} is not described in full")
    found = []
    for chunk in entry.get("chunks"):
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
    """Return the dtype of TensorProperties. Their state is a tuple or, in older versions of torch, a mapping."""
    if type(properties.state) is tuple and properties.state:
        return properties.state[0]
    return properties.get("dtype")


def _extents(value: Any) -> Shape:
    found = counts(value)
    if found is None or len(found) > _MAX_DIMENSIONS:
        raise Fault("a shape or an offset in it is not a list of counts")
    return found


def _paths(planner_data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield (name, path). Other planner data is ignored, as torch does."""
    if type(planner_data) is not dict:
        return
    for fqn, path in planner_data.items():
        is_path = type(path) in (tuple, list) and 0 < len(path) <= _MAX_PATH
        if type(fqn) is str and is_path and all(type(part) in (str, int) for part in path):
            yield fqn, tuple(path)


# ---------------------------------------------------------------- items


def _archive(directory: Path, item: DcpLocation, max_program_bytes: int | None) -> Archive:
    """Describe the archive in an item. Raises any exception if it is damaged."""
    with os.fdopen(open_safely(directory, item.file), "rb") as file:
        return describe_file(
            file.fileno(), item.start, item.nbytes, max_program_bytes=max_program_bytes
        )


def _raw_start(archive: Archive, dtype: str, sizes: Shape) -> int:
    """Return the offset in the file at which the tensor's row-major bytes begin."""
    view = archive.value
    expected = (dtype, sizes, 0)
    if not isinstance(view, StoredView) or (view.dtype, view.shape, view.offset) != expected:
        raise Fault(
            f"it is not a plain tensor of {dtype} {list(sizes)}, or a view into a larger one"
        )
    if view.num_outer_dimensions > 0:
        why = "it was saved transposed, or as channels_last"
        raise Fault(f"its elements are not in row-major order ({why})")
    begin, end = archive.storages.get(view.key, (0, 0))
    if end - begin != nbytes_of(dtype, sizes):
        raise Fault(f"its record has {end - begin} bytes, not {nbytes_of(dtype, sizes)}")
    return begin
