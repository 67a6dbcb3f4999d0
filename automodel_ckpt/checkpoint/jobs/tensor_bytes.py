"""The row-major bytes of tensors: of those on the CPU in place if possible, of those on a GPU through two buffers.

An ordinary copy from a GPU goes through a buffer of the driver, and the next one begins when the host has taken the
data. Here, the GPU fills one page-locked buffer while the host digests and writes the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_ckpt.checkpoint.files.direct import begins_at_a_sector

log = logging.getLogger("automodel_ckpt")

BLOCK_BYTES = 32 << 20
_OFFSET = 64
"""Bytes from a sector's start to memory that is not aligned for O_DIRECT."""

Allocate = Callable[[int], Tensor]
"""Takes a number of bytes, and returns a uint8 tensor of this size in host memory."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that may be in progress: *target* on the host, complete after *event*; None: complete now."""

    target: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> memoryview:
        if self.event is not None:
            self.event.synchronize()
        return self.target.numpy().data


def raw_bytes(tensor: Tensor) -> memoryview:
    """The row-major bytes of a tensor: its memory where it is contiguous and on the CPU, else a copy."""
    # A view of live memory if possible: the caller reads it before training changes the tensor.
    return flat_bytes(tensor.to("cpu")).numpy().data


def flat_bytes(tensor: Tensor) -> Tensor:
    """The row-major bytes of a tensor on its device: of shape (bytes,), a view where it is contiguous, else a copy."""
    contiguous = tensor.detach().contiguous()
    # A lazy conjugation or negation is not in the bytes yet.
    if contiguous.is_conj() or contiguous.is_neg():
        contiguous = contiguous.resolve_conj().resolve_neg()
    return contiguous.reshape(-1).view(torch.uint8)


def page_locked(nbytes: int) -> Tensor:
    """Return *nbytes* of page-locked memory, or of ordinary memory where the system does not allow it."""
    try:
        # torch keeps freed page-locked memory for the next save.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.debug("page-locked memory is not available: %s", error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def blocks_of(
    flat: Tensor, *, block_bytes: int = BLOCK_BYTES, allocate: Allocate = page_locked
) -> Iterator[memoryview]:
    """Yield the bytes of *flat*, a uint8 vector on any device, in blocks. A block is valid until the next one.

    At most two buffers of *block_bytes* are used.
    """
    size = min(block_bytes, flat.numel())
    buffers = [_unaligned(allocate(size + _OFFSET))]
    if flat.numel() > block_bytes:
        buffers.append(_unaligned(allocate(size + _OFFSET)))
    earlier: _Copy | None = None
    for number, start in enumerate(range(0, flat.numel(), block_bytes)):
        part = flat[start : start + block_bytes]
        # The caller has finished with the block that was in this buffer.
        copy = _begin(buffers[number % len(buffers)][: part.numel()], part)
        if earlier is not None:
            yield earlier.wait()
        earlier = copy
    if earlier is not None:
        yield earlier.wait()


def _unaligned(memory: Tensor) -> Tensor:
    """Return a view of *memory*, at most _OFFSET bytes shorter, that is not aligned for O_DIRECT.

    An aligned block would be written later, directly from the buffer, which has other data by then.
    """
    view = memory.numpy().data
    return memory[_OFFSET:] if begins_at_a_sector(view) else memory[: len(memory) - _OFFSET]


def _begin(target: Tensor, source: Tensor) -> _Copy:
    target.copy_(source, non_blocking=True)
    if not source.is_cuda:
        return _Copy(target, None)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(source.device))
    return _Copy(target, event)
