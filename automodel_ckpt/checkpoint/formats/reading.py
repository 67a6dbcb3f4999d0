"""Read a tree: a rank reads the parts of slices that it needs, into the memory of its tensors.

Large ones are read in blocks, by several threads (``read_ahead.py``).

Used for all formats, because the manifest has the position of every slice's raw bytes. Pickles are read only for
values that are not tensors, by a reader of plain data (``files/pickle_reader.py``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.formats.description import (
    DTYPE_CODES,
    DTYPES,
    is_sharded,
    local_box,
    local_tensor,
)
from automodel_ckpt.checkpoint.formats.read_ahead import (
    BLOCK_BYTES,
    convert,
    num_threads,
    read_all,
    send,
)
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Run,
    Slice,
    Tensor,
    boxes,
    intersection,
    nbytes_of,
    overlap,
)
from automodel_ckpt.checkpoint.parts.tree import Blob, Tree
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.checkpoint.tensors.box_reader import map_slice
from automodel_ckpt.checkpoint.tensors.float_cast import storage_dtype
from automodel_ckpt.errors import CheckpointUnusable, unusable

_MOST_PARTS = 64
"""Most tensors of a block: in a model of many small ones, each thread has a few of them."""
_LARGE_RUN_BYTES = 64 << 10
"""Shorter runs of bytes are read in one thread: taking turns to begin a read costs more than it saves."""
_ALIGNMENT = 16
"""Bytes of the largest element."""


class _Read(NamedTuple):
    """The box *wanted* of a slice, relative to it, its bytes, and where it is read to."""

    stored: Slice
    wanted: Box
    nbytes: int
    target: torch.Tensor

    @property
    def position(self) -> tuple[str, int]:
        return self.stored.file, self.stored.start

    @property
    def is_whole(self) -> bool:
        """Whether all bytes of the slice are read."""
        return self.wanted.sizes == self.stored.sizes

    @property
    def is_on_cpu(self) -> bool:
        return self.target.device.type == "cpu"

    @property
    def is_in_place(self) -> bool:
        """Whether the stored bytes can be read into the target's memory as they are."""
        target = self.target
        return (
            self.is_on_cpu
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
            and DTYPE_CODES.get(target.dtype) == self.stored.dtype
        )

    def parts(self) -> Iterator[_Read]:
        """Reads of at most BLOCK_BYTES that are this one together, in its order."""
        if self.nbytes <= BLOCK_BYTES:
            yield self
            return
        itemsize = nbytes_of(self.stored.dtype, (1,))
        origin = Box((0,) * len(self.wanted.sizes), self.wanted.sizes)
        for box in boxes(self.wanted.sizes, BLOCK_BYTES // itemsize):
            offsets = tuple(a + b for a, b in zip(self.wanted.offsets, box.offsets, strict=True))
            target = self.target[box.within(origin)]
            nbytes = box.numel * itemsize
            yield _Read(self.stored, Box(offsets, box.sizes), nbytes, target)

    def runs(self) -> Iterator[Run]:
        """The runs of bytes of the box: in the slice, and in a buffer of the box's shape."""
        whole_slice = Box((0,) * len(self.stored.sizes), self.stored.sizes)
        yield from overlap(whole_slice, self.wanted, nbytes_of(self.stored.dtype, ()))

    def byte_range(self) -> tuple[str, int, int]:
        """(file, start, end) of the bytes of the box. Gaps in them are included."""
        file, start = self.position
        runs = list(self.runs())
        return file, start + runs[0].source, start + runs[-1].source + runs[-1].nbytes


def read_value(checkpoint: Path, file: str) -> Any:
    """The plain data in a file that ``torch.save`` wrote.

    Raises :class:`CheckpointUnusable` for any other content, OSError where it is not a regular file of the checkpoint.
    """
    from automodel_ckpt.checkpoint.pickles import pickle_reader

    return pickle_reader.load(read_safely(checkpoint, file), str(checkpoint / file))


def read_object(
    checkpoint: Path, tree: Tree, name: str, remote: VerifiedRanges | None = None
) -> Any:
    """The plain value that a tree has under *name*. Raises :class:`CheckpointUnusable` naming the file.

    With *remote*, it is read from there, and *checkpoint* is only for messages.
    """
    with _Files(checkpoint, remote) as files:
        return _plain_value(files, tree.objects[name], name)


def read_tree(
    checkpoint: Path,
    tree: Tree,
    state_dict: ValueDict,
    remote: VerifiedRanges | None = None,
) -> None:
    """Fill a (flat) *state_dict* with the values of the tree under its keys: tensors in place, other values replaced.

    Keys that the tree lacks are not changed: compare first (:mod:`..state.mismatch`). Not collective. With *remote*,
    the bytes are read from there, and *checkpoint* is only for messages. Raises :class:`CheckpointUnusable` naming the
    file.
    """
    blobs: list[tuple[str, Blob]] = []
    reads: list[_Read] = []
    # Computed once for each mesh, placements and shape.
    boxes_of_shards: dict[tuple[Any, ...], Box | None] = {}
    for fqn, value in state_dict.items():
        if fqn in tree.objects:
            blobs.append((fqn, tree.objects[fqn]))
        elif fqn in tree.tensors:
            stored = tree.tensors[fqn]
            if tuple(value.shape) != stored.shape:
                raise ValueError(f"{fqn} has the shape {stored.shape}, not {value.shape}")
            key: tuple[Any, ...] = (value.shape,)
            if is_sharded(value):
                key = (id(value.device_mesh), value.placements, value.shape)
            if key not in boxes_of_shards:
                boxes_of_shards[key] = local_box(value)
            box = boxes_of_shards[key]
            if box is not None:
                reads += _reads(stored, local_tensor(value).detach(), box)
    # In the order of the disk.
    blobs.sort(key=lambda item: (item[1].file, item[1].start))
    reads.sort(key=lambda read: read.position)
    if remote is not None:
        ranges = [(blob.file, blob.start, blob.start + blob.nbytes) for _, blob in blobs]
        remote.expect([*ranges, *(read.byte_range() for read in reads)])
    # What is remote is read in order, by one thread.
    threads = num_threads(sum(read.nbytes for read in reads)) if remote is None else 1
    to_gpu = any(read.target.is_cuda for read in reads)
    with _Files(checkpoint, remote) as files:
        for fqn, blob in blobs:
            state_dict[fqn] = _plain_value(files, blob, fqn)
        read_all(_blocks(reads, files), threads, to_gpu=to_gpu)


def read_box(root: Path, tensor: Tensor, box: Box) -> torch.Tensor:
    """Read the part *box* of a stored tensor, in its dtype, into memory of the host.

    Raises :class:`CheckpointUnusable` naming the file.
    """
    values = torch.empty(box.sizes, dtype=DTYPES[tensor.dtype], device="cpu")
    if box.numel:
        reads = sorted(_reads(tensor, values, box), key=lambda read: read.position)
        with _Files(root) as files:
            read_all(_blocks(reads, files), 1, to_gpu=False)
    return values


def _plain_value(files: _Files, blob: Blob, name: str) -> Any:
    from automodel_ckpt.checkpoint.pickles import pickle_reader

    return pickle_reader.load(files.read_blob(blob), name)


def _reads(tensor: Tensor, local: torch.Tensor, box: Box) -> Iterator[_Read]:
    """Describe what to read of a stored tensor into *local*, its part *box*."""
    zeros = (0,) * len(box.sizes)
    for stored in tensor.overlapping(box):
        if stored.sizes == box.sizes and stored.offsets == box.offsets:
            yield _Read(stored, Box(zeros, box.sizes), stored.nbytes, local)
            continue
        common = intersection(stored.box, box)
        assert common is not None
        offsets = tuple(a - b for a, b in zip(common.offsets, stored.offsets, strict=True))
        nbytes = nbytes_of(stored.dtype, common.sizes)
        yield _Read(stored, Box(offsets, common.sizes), nbytes, local[common.within(box)])


def _blocks(reads: Iterable[_Read], files: _Files) -> Iterator[_Tensors]:
    """The blocks that are read together, in the order of *reads*."""
    block = _Tensors(files)
    for read in reads:
        for part in read.parts():
            if not block.has_room(part):
                yield block
                block = _Tensors(files)
            block.add(part)
    yield block


class _Tensors:
    """Neighboring parts of tensors: a block of :mod:`~automodel_ckpt.checkpoint.formats.read_ahead`."""

    def __init__(self, files: _Files) -> None:
        self._files = files
        self._in_place: list[_Read] = []
        self._staged: list[tuple[_Read, int]] = []
        self._nbytes = 0
        self.staged_bytes = 0
        self.reads_elsewhere = True

    def has_room(self, part: _Read) -> bool:
        """Whether :meth:`add` can add *part*."""
        count = len(self._in_place) + len(self._staged)
        return count == 0 or (count < _MOST_PARTS and self._nbytes + part.nbytes <= BLOCK_BYTES)

    def add(self, part: _Read) -> None:
        """Read *part* with this block."""
        aligned = -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._nbytes += aligned
        if part.is_in_place:
            self._in_place.append(part)
        else:
            self._staged.append((part, self.staged_bytes))
            self.staged_bytes += aligned
        if not part.is_whole and part.stored.strides is None:
            first = next(part.runs(), None)
            if first is not None and first.nbytes < min(_LARGE_RUN_BYTES, part.nbytes):
                self.reads_elsewhere = False

    def read(self, staging: torch.Tensor) -> None:
        """Read the bytes of all parts."""
        for part in self._in_place:
            self._files.read_into(part, _memory_of(part.target))
        memory = staging.numpy().data
        for part, start in self._staged:
            self._files.read_into(part, memory[start : start + part.nbytes])
            if part.is_on_cpu:
                convert(_values(part, start, staging), part.target)

    def put(self, staging: torch.Tensor) -> set[torch.device]:
        """Copy the parts for other devices into their tensors."""
        devices: set[torch.device] = set()
        for part, start in self._staged:
            if not part.is_on_cpu:
                devices.update(send(_values(part, start, staging), part.target))
        return devices


def _memory_of(target: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    # The stride of a dimension of one element can be any number.
    elements = target.as_strided((target.numel(),), (1,))
    return elements.view(torch.uint8).numpy().data


def _values(part: _Read, start: int, staging: torch.Tensor) -> torch.Tensor:
    """The values of *part*. Its bytes begin at *start* in *staging*."""
    raw = staging[start : start + part.nbytes]
    return raw.view(DTYPES[part.stored.dtype]).reshape(part.wanted.sizes)


class _Files:
    """The files of a checkpoint, each opened once, or read from *remote*. Threads may share it if it is not remote."""

    def __init__(self, checkpoint: Path, remote: VerifiedRanges | None = None) -> None:
        self._checkpoint, self._remote = checkpoint, remote
        self._open: dict[str, int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read_blob(self, blob: Blob) -> bytes:
        data = bytearray(blob.nbytes)
        self._read(blob.file, memoryview(data), blob.start)
        return bytes(data)

    def read_into(self, read: _Read, memory: memoryview) -> None:
        """Fill *memory* with the row-major bytes of the box of a stored slice."""
        stored = read.stored
        if stored.strides is not None:
            self._gather(stored, read.wanted, memory)
            return
        if read.is_whole:
            self._read(stored.file, memory, stored.start)
            return
        for run in read.runs():
            target = memory[run.target : run.target + run.nbytes]
            self._read(stored.file, target, stored.start + run.source)

    def _gather(self, stored: Slice, wanted: Box, memory: memoryview) -> None:
        """Fill *memory* with the elements *wanted* of a slice with strides in the file."""
        dtype = storage_dtype(stored.dtype, DTYPE_BITS[stored.dtype])
        with os.fdopen(os.dup(self._descriptor(stored.file)), "rb") as file:
            try:
                values = map_slice(file, stored, dtype)
            except ValueError as error:
                raise self._too_short(stored.file, stored.start) from error
        whole = Box((0,) * len(stored.sizes), stored.sizes)
        target = np.frombuffer(memory, dtype).reshape(wanted.sizes)
        target[...] = values[wanted.within(whole)]

    def _read(self, file: str, memory: memoryview, start: int) -> None:
        if self._remote is not None:
            self._remote.read(file, memory, start)
            return
        while memory:
            descriptor = self._descriptor(file)
            try:
                count = os.preadv(descriptor, [memory], start)
            except OSError as error:
                error.filename = str(self._checkpoint / file)
                raise
            if count == 0:
                raise self._too_short(file, start)
            # preadv may return fewer bytes than it was asked for.
            memory, start = memory[count:], start + count

    def _too_short(self, file: str, start: int) -> CheckpointUnusable:
        return unusable(
            "a file is shorter than the manifest states", self._checkpoint / file, start
        )

    def _descriptor(self, file: str) -> int:
        with self._opening:
            if file not in self._open:
                self._open[file] = open_safely(self._checkpoint, file)
            return self._open[file]
