"""Read a tree: PyTorch DCP plans which parts of which slices a rank needs, and they are read in place.

Used for all formats, because the manifest has the position of every slice's raw bytes. Pickles are read only for
values that are not tensors, by a reader of plain data (``files/pickle_reader.py``).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files import pickle_reader
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.formats.planning import DTYPE_CODES, DTYPES
from automodel_ckpt.checkpoint.manifest import Blob, Tree
from automodel_ckpt.checkpoint.slices import Box, Slice, contiguous_slices, nbytes_of, overlap
from automodel_ckpt.checkpoint.tensors.float_cast import storage_dtype
from automodel_ckpt.checkpoint.tensors.strided import map_slice
from automodel_ckpt.errors import CheckpointUnusable

_HINT = "use another checkpoint of this run (`ckpt ls`)"

SliceIndex = tuple[str, tuple[int, ...]]
"""The FQN of a slice's tensor, and its offsets."""


class ByteRanges(Protocol):
    """Reads the files of a checkpoint that are not on this machine."""

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Prepare to read these byte ranges, (file, start, end), in this order."""

    def read(self, file: str, memory: memoryview, start: int) -> None:
        """Fill *memory* with the bytes of *file* from *start*. Raises :class:`CheckpointUnusable`."""


class _Planner(DefaultLoadPlanner):
    """DCP's planner, except that values that are not tensors are unpickled by a reader that runs no code."""

    def __init__(self) -> None:
        # Partial: DCP would raise for the first missing key; `differences` reports all of them
        # before.
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True
        )

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # The base class calls torch.load(weights_only=False) (torch 2.13), which can run code in
        # the file.
        fqn = read_item.dest_index.fqn
        self.original_state_dict[fqn] = pickle_reader.load(value.getvalue(), fqn)


def read_value(checkpoint: Path, file: str) -> Any:
    """The plain data in a file that ``torch.save`` wrote.

    Raises :class:`CheckpointUnusable` for any other content, OSError where it is not a regular file of the checkpoint.
    """
    return pickle_reader.load(read_safely(checkpoint, file), str(checkpoint / file))


def read_object(checkpoint: Path, tree: Tree, name: str, remote: ByteRanges | None = None) -> Any:
    """The plain value that a tree has under *name*. Raises :class:`CheckpointUnusable` naming the file.

    With *remote*, it is read from there, and *checkpoint* is only for messages.
    """
    with _Files(checkpoint, remote) as files:
        return pickle_reader.load(files.read_blob(tree.objects[name]), name)


def metadata_of(tree: Tree) -> Metadata:
    """The tree in the format of DCP's planner."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for fqn, tensor in tree.tensors.items():
        chunks: list[ChunkStorageMetadata] = []
        for stored in contiguous_slices(tensor):
            chunk = ChunkStorageMetadata(torch.Size(stored.offsets), torch.Size(stored.sizes))
            chunks.append(chunk)
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        state[fqn] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for fqn in tree.objects:
        state[fqn] = BytesStorageMetadata()
    return Metadata(state)


def read_tree(
    checkpoint: Path, tree: Tree, state_dict: dict[str, Any], remote: ByteRanges | None = None
) -> None:
    """Fill a (flat) *state_dict* with the values of the tree under its keys: tensors in place, other values replaced.

    Keys that the tree lacks are not changed: compare first (:func:`differences`). Not collective. With *remote*, the
    bytes are read from there, and *checkpoint* is only for messages. Raises :class:`CheckpointUnusable` naming the
    file.
    """
    planner = _Planner()
    planner.set_up_planner(state_dict, metadata_of(tree))
    plan = planner.create_local_plan()
    slices: dict[SliceIndex, Slice] = {}
    for tensor in tree.tensors.values():
        for stored in contiguous_slices(tensor):
            slices[stored.fqn, stored.offsets] = stored
    items = sorted(plan.items, key=lambda item: _position(item, slices, tree))
    if remote is not None:
        remote.expect(_ranges(items, slices, tree))
    with _Files(checkpoint, remote) as files:
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                data = files.read_blob(tree.objects[item.storage_index.fqn])
                planner.load_bytes(item, io.BytesIO(data))
            else:
                files.read_into(slices[_index(item)], item, planner.resolve_tensor(item))


def _index(item: ReadItem) -> SliceIndex:
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _position(item: ReadItem, slices: Mapping[SliceIndex, Slice], tree: Tree) -> tuple[str, int]:
    """(file, byte) of an item, to read in the order of the disk."""
    if item.type == LoadItemType.BYTE_IO:
        blob = tree.objects[item.storage_index.fqn]
        return blob.file, blob.start
    stored = slices[_index(item)]
    return stored.file, stored.start


def _ranges(
    items: Iterable[ReadItem], slices: Mapping[SliceIndex, Slice], tree: Tree
) -> Iterator[tuple[str, int, int]]:
    """Yield (file, start, end) of the bytes that each item needs. Gaps in them are included."""
    for item in items:
        file, start = _position(item, slices, tree)
        if item.type == LoadItemType.BYTE_IO:
            yield file, start, start + tree.objects[item.storage_index.fqn].nbytes
            continue
        stored = slices[_index(item)]
        wanted = Box(tuple(item.storage_offsets), tuple(item.lengths))
        whole_slice = Box((0,) * len(stored.sizes), stored.sizes)
        runs = list(overlap(whole_slice, wanted, nbytes_of(stored.dtype, ())))
        if runs:
            yield file, start + runs[0].source, start + runs[-1].source + runs[-1].nbytes


class _Files:
    """The files of a checkpoint, each opened once, or read from *remote*."""

    def __init__(self, checkpoint: Path, remote: ByteRanges | None = None) -> None:
        self._checkpoint, self._remote = checkpoint, remote
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read_blob(self, blob: Blob) -> bytes:
        data = bytearray(blob.nbytes)
        self._read(blob.file, memoryview(data), blob.start)
        return bytes(data)

    def read_into(self, stored: Slice, item: ReadItem, target: torch.Tensor) -> None:
        """Copy the box of a stored slice that *item* needs into *target* (of that box's shape, on any device)."""
        wanted = Box(tuple(item.storage_offsets), tuple(item.lengths))
        whole_slice = Box((0,) * len(stored.sizes), stored.sizes)
        target = target.detach()
        # Only then are the stored bytes those of the tensor's memory.
        in_place = (
            target.device.type == "cpu"
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
            and DTYPE_CODES.get(target.dtype) == stored.dtype
        )
        buffer = target
        if not in_place:
            buffer = torch.empty(wanted.sizes, dtype=DTYPES[stored.dtype])
        memory = buffer.reshape(-1).view(torch.uint8).numpy().data
        if stored.strides is not None:
            self._gather(stored, wanted, memory)
        else:
            for run in overlap(whole_slice, wanted, nbytes_of(stored.dtype, ())):
                target_bytes = memory[run.target : run.target + run.nbytes]
                self._read(stored.file, target_bytes, stored.start + run.source)
        if not in_place:
            target.copy_(buffer)

    def _gather(self, stored: Slice, wanted: Box, memory: memoryview) -> None:
        """Fill *memory* with the elements *wanted* of a slice whose elements are apart in the file."""
        dtype = storage_dtype(stored.dtype, DTYPE_BITS[stored.dtype])
        with os.fdopen(os.dup(self._descriptor(stored.file)), "rb") as file:
            values = map_slice(file, stored, dtype)
        index = wanted.within(Box((0,) * len(stored.sizes), stored.sizes))
        np.frombuffer(memory, dtype).reshape(wanted.sizes)[...] = values[index]

    def _read(self, file: str, memory: memoryview, start: int) -> None:
        if self._remote is not None:
            self._remote.read(file, memory, start)
            return
        while memory:
            count = os.preadv(self._descriptor(file), [memory], start)
            if count == 0:
                raise CheckpointUnusable(
                    "a file is shorter than the manifest says",
                    where=str(self._checkpoint / file),
                    value=start,
                    hint=_HINT,
                )
            # preadv may return fewer bytes than it was asked for.
            memory, start = memory[count:], start + count

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = open_safely(self._checkpoint, file)
        return self._open[file]


def differences(tree: Tree, state_dict: Mapping[str, Any]) -> list[str]:
    """The differences between a tree and a flat state dict, one line each; empty where it can be loaded."""
    here = dict(state_dict)
    lines: list[str] = []
    for fqn in (*tree.tensors, *tree.objects):
        if fqn not in here:
            lines.append(f"- {fqn}: saved, but not here")
    for fqn in here:
        if fqn not in tree.tensors and fqn not in tree.objects:
            lines.append(f"+ {fqn}: here, but not saved")
    for fqn, tensor in tree.tensors.items():
        if fqn not in here:
            continue
        # With the dtype: reading into another one casts without a message.
        saved = f"{tensor.dtype} {list(tensor.shape)}"
        now = _describe(here[fqn])
        if now != saved:
            lines.append(f"~ {fqn}: saved as {saved}, here {now}")
    return lines


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{DTYPE_CODES.get(value.dtype, str(value.dtype))} {list(value.shape)}"
    return f"a value of type {type(value).__name__}"
