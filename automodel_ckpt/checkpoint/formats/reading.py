"""Read a tree: a rank reads the parts of slices that it needs, into the memory of its tensors.

Used for all formats, because the manifest has the position of every slice's raw bytes. Pickles are read only for
values that are not tensors, by a reader of plain data (``pickles/pickle_reader.py``).

Several threads read blocks of large tensors. One thread copies a few GB/s from the page cache, and a copy to a GPU from
ordinary memory waits for the driver's buffers. Here, the blocks of tensors on a GPU are read into page-locked memory,
from which the GPU copies them while the next ones are read. The memory is used again for later blocks: the kernel
clears each new page, which takes as long as reading it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.files.threads import CallingThread, cores_of_rank, started_pool
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Run,
    Slice,
    Tensor,
    boxes,
    intersection,
    nbytes_of,
    overlap,
    whole_box,
)
from automodel_ckpt.checkpoint.parts.tree import Blob, Tree
from automodel_ckpt.checkpoint.state.storable import (
    DTYPE_CODES,
    DTYPES,
    is_sharded,
    local_box,
    local_tensor,
    page_locked,
)
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.checkpoint.tensors.box_reader import map_slice
from automodel_ckpt.checkpoint.tensors.float_cast import storage_dtype
from automodel_ckpt.errors import CheckpointUnusable, unusable

BLOCK_BYTES = 4 << 20
"""Most bytes of a block that go through memory of the host."""
_MOST_THREADS = 8
_PARALLEL_FROM_BYTES = 32 << 20
"""From here on, threads save more time than it takes to start them."""

_SERIAL_ELEMENTS = (32 << 10) - 1
"""torch divides work among its threads from 32 Ki elements on (``at::internal::GRAIN_SIZE``)."""


def _num_threads(nbytes: int) -> int:
    """How many threads of this process read *nbytes*: 1 if these are few. The ranks of a node share its cores."""
    if nbytes < _PARALLEL_FROM_BYTES:
        return 1
    # With two, one reads while the other one waits for a disk, even on a single core.
    return max(2, min(_MOST_THREADS, cores_of_rank()))


def _read_all(blocks: Iterable[_Block], threads: int, *, to_gpu: bool) -> None:
    """Read *blocks* and put them into their tensors, in order. Returns after all copies.

    *threads* read; with 1, or if the process cannot start threads, the calling thread does. At most ``2 * threads *
    BLOCK_BYTES`` of memory are used, which are page-locked *to_gpu*. Raises the error of the first block that has one.
    """
    num_slots = 2 * threads
    # Memory that nothing is read into is not used. With 8 threads it has the size that torch keeps for the two buffers
    # of saves.
    size = num_slots * BLOCK_BYTES
    staging = page_locked(size) if to_gpu else torch.empty(size, dtype=torch.uint8, device="cpu")
    # Copies to GPUs, by the slot of memory that they may still read.
    events: list[list[torch.cuda.Event]] = [[] for _ in range(num_slots)]
    calling_thread = CallingThread()
    pool = (started_pool(threads, "read") if threads > 1 else None) or calling_thread
    waiting: deque[tuple[_Block, torch.Tensor, int, Future[None]]] = deque()

    def finish_first() -> None:
        block, memory, slot, reading = waiting.popleft()
        reading.result()
        for device in block.put(memory):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events[slot].append(event)

    def await_copies(slot: int) -> None:
        for event in events[slot]:
            event.synchronize()
        events[slot].clear()

    try:
        for number, block in enumerate(blocks):
            # Two fewer than there are slots: the GPU copies from the memory of one or two blocks while others are read.
            if len(waiting) > num_slots - 2:
                finish_first()
            slot = number % num_slots
            await_copies(slot)
            start = slot * BLOCK_BYTES
            memory = staging[start : start + block.staged_bytes]
            # Errors of earlier blocks are raised before the error of the calling thread.
            executor = pool if block.reads_elsewhere else calling_thread
            reading = executor.submit(_read_block, block, memory, torch.is_inference_mode_enabled())
            waiting.append((block, memory, slot, reading))
        while waiting:
            finish_first()
    finally:
        # Before the caller closes the files.
        pool.end()
        for slot in range(num_slots):
            await_copies(slot)


def _read_block(block: _Block, memory: torch.Tensor, is_inference: bool) -> None:
    # Each thread has this mode separately, and only in it can tensors be changed that were created in it.
    with torch.inference_mode(is_inference):
        block.read(memory)


def _convert(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy *values* into *target* of another type or layout, both on the CPU, without the threads of torch.

    Between two copies, these would wait in loops, on the cores that other threads read with.
    """
    if values.numel() <= _SERIAL_ELEMENTS:
        target.copy_(values)
        return
    sizes = tuple(values.shape)
    for box in boxes(sizes, _SERIAL_ELEMENTS):
        index = box.within(whole_box(sizes))
        target[index].copy_(values[index])


def _send(values: torch.Tensor, target: torch.Tensor) -> Sequence[torch.device]:
    """Copy *values*, in memory of the host, into *target* on a device; returns the GPU that may not have finished."""
    if not target.is_cuda:
        target.copy_(values)
        return ()
    if target.dtype != values.dtype or not target.is_contiguous():
        # torch would convert the values on the host, in new memory.
        values = values.to(target.device, non_blocking=True)
    target.copy_(values, non_blocking=True)
    return (target.device,)


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
        origin = whole_box(self.wanted.sizes)
        for box in boxes(self.wanted.sizes, BLOCK_BYTES // itemsize):
            offsets = tuple(a + b for a, b in zip(self.wanted.offsets, box.offsets, strict=True))
            target = self.target[box.within(origin)]
            nbytes = box.numel * itemsize
            yield _Read(self.stored, Box(offsets, box.sizes), nbytes, target)

    def runs(self) -> Iterator[Run]:
        """The runs of bytes of the box: in the slice, and in a buffer of the box's shape."""
        yield from overlap(
            whole_box(self.stored.sizes), self.wanted, nbytes_of(self.stored.dtype, ())
        )

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
    threads = _num_threads(sum(read.nbytes for read in reads)) if remote is None else 1
    to_gpu = any(read.target.is_cuda for read in reads)
    with _Files(checkpoint, remote) as files:
        for fqn, blob in blobs:
            state_dict[fqn] = _plain_value(files, blob, fqn)
        _read_all(_blocks(reads, files), threads, to_gpu=to_gpu)


def read_box(root: Path, tensor: Tensor, box: Box) -> torch.Tensor:
    """Read the part *box* of a stored tensor, in its dtype, into memory of the host.

    Raises :class:`CheckpointUnusable` naming the file.
    """
    values = torch.empty(box.sizes, dtype=DTYPES[tensor.dtype], device="cpu")
    if box.numel:
        reads = sorted(_reads(tensor, values, box), key=lambda read: read.position)
        with _Files(root) as files:
            _read_all(_blocks(reads, files), 1, to_gpu=False)
    return values


def _plain_value(files: _Files, blob: Blob, name: str) -> Any:
    from automodel_ckpt.checkpoint.pickles import pickle_reader

    return pickle_reader.load(files.read_blob(blob), name)


def _reads(tensor: Tensor, local: torch.Tensor, box: Box) -> Iterator[_Read]:
    """Describe what to read of a stored tensor into *local*, its part *box*."""
    for stored in tensor.overlapping(box):
        if stored.sizes == box.sizes and stored.offsets == box.offsets:
            yield _Read(stored, whole_box(box.sizes), stored.nbytes, local)
            continue
        common = intersection(stored.box, box)
        assert common is not None
        offsets = tuple(a - b for a, b in zip(common.offsets, stored.offsets, strict=True))
        nbytes = nbytes_of(stored.dtype, common.sizes)
        yield _Read(stored, Box(offsets, common.sizes), nbytes, local[common.within(box)])


def _blocks(reads: Iterable[_Read], files: _Files) -> Iterator[_Block]:
    """The blocks that are read together, in the order of *reads*."""
    block = _Block(files)
    for read in reads:
        for part in read.parts():
            if not block.has_room(part):
                yield block
                block = _Block(files)
            block.add(part)
    yield block


class _Block:
    """Neighboring parts of tensors, which are read together.

    :attr:`staged_bytes` is how much memory of the host :meth:`read` needs, at most BLOCK_BYTES. Another thread may call
    it if :attr:`reads_elsewhere`.
    """

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
        """Read the bytes of all parts. *staging*, a uint8 vector, gets what is not read in place."""
        for part in self._in_place:
            self._files.read_into(part, _memory_of(part.target))
        memory = staging.numpy().data
        for part, start in self._staged:
            self._files.read_into(part, memory[start : start + part.nbytes])
            if part.is_on_cpu:
                _convert(_values(part, start, staging), part.target)

    def put(self, staging: torch.Tensor) -> set[torch.device]:
        """Copy the parts for other devices into their tensors; return the GPUs that may not have finished that."""
        devices: set[torch.device] = set()
        for part, start in self._staged:
            if not part.is_on_cpu:
                devices.update(_send(_values(part, start, staging), part.target))
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
        target = np.frombuffer(memory, dtype).reshape(wanted.sizes)
        target[...] = values[wanted.within(whole_box(stored.sizes))]

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
