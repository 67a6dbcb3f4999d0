"""Several threads read blocks of files into tensors on the CPU, or for a GPU, to which the calling thread copies them.

One thread copies a few GB/s from the page cache, and a copy to a GPU from ordinary memory waits for the driver's
buffers. Here, the blocks of tensors on a GPU are read into page-locked memory, from which the GPU copies them while the
next ones are read. The memory is used again for later blocks: the kernel clears each new page, which takes as long as
reading it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from automodel_ckpt.checkpoint.files.threads import CallingThread, cores_of_rank, started_pool
from automodel_ckpt.checkpoint.parts.slices import Box, boxes
from automodel_ckpt.checkpoint.state.storable import page_locked

BLOCK_BYTES = 4 << 20
"""Most bytes of a block that go through memory of the host."""
_MOST_THREADS = 8
_PARALLEL_FROM_BYTES = 32 << 20
"""From here on, threads save more time than it takes to start them."""

_SERIAL_ELEMENTS = (32 << 10) - 1
"""torch divides work among its threads from 32 Ki elements on (``at::internal::GRAIN_SIZE``)."""


class Block(Protocol):
    """Some bytes of files, and the tensors that they are for."""

    @property
    def staged_bytes(self) -> int:
        """How much memory of the host :meth:`read` needs, at most BLOCK_BYTES; 0 if it reads into the tensors."""

    @property
    def reads_elsewhere(self) -> bool:
        """Whether another thread may call :meth:`read`."""

    def read(self, staging: Tensor) -> None:
        """Read the bytes and fill the tensors on the CPU. *staging*, a uint8 vector, gets what is not read in place."""

    def put(self, staging: Tensor) -> Iterable[torch.device]:
        """Copy what *staging* has for tensors on other devices; returns the GPUs that may not have finished that."""


def num_threads(nbytes: int) -> int:
    """How many threads of this process read *nbytes*: 1 if these are few. The ranks of a node share its cores."""
    if nbytes < _PARALLEL_FROM_BYTES:
        return 1
    # With two, one reads while the other one waits for a disk, even on a single core.
    return max(2, min(_MOST_THREADS, cores_of_rank()))


def read_all(blocks: Iterable[Block], threads: int, *, to_gpu: bool) -> None:
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
    waiting: deque[tuple[Block, Tensor, int, Future[None]]] = deque()

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
            reading = executor.submit(_read, block, memory, torch.is_inference_mode_enabled())
            waiting.append((block, memory, slot, reading))
        while waiting:
            finish_first()
    finally:
        # Before the caller closes the files.
        pool.end()
        for slot in range(num_slots):
            await_copies(slot)


def _read(block: Block, memory: Tensor, is_inference: bool) -> None:
    # Each thread has this mode separately, and only in it can tensors be changed that were created in it.
    with torch.inference_mode(is_inference):
        block.read(memory)


def convert(values: Tensor, target: Tensor) -> None:
    """Copy *values* into *target* of another type or layout, both on the CPU, without the threads of torch.

    Between two copies, these would wait in loops, on the cores that other threads read with.
    """
    if values.numel() <= _SERIAL_ELEMENTS:
        target.copy_(values)
        return
    sizes = tuple(values.shape)
    whole = Box((0,) * len(sizes), sizes)
    for box in boxes(sizes, _SERIAL_ELEMENTS):
        index = box.within(whole)
        target[index].copy_(values[index])


def send(values: Tensor, target: Tensor) -> Sequence[torch.device]:
    """Copy *values*, in memory of the host, into *target* on a device; returns the GPU that may not have finished."""
    if not target.is_cuda:
        target.copy_(values)
        return ()
    if target.dtype != values.dtype or not target.is_contiguous():
        # torch would convert the values on the host, in new memory.
        values = values.to(target.device, non_blocking=True)
    target.copy_(values, non_blocking=True)
    return (target.device,)
