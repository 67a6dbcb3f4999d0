"""Copies between the memory of the host and a device that do not make the host wait, and times of a device.

CUDA copies from and to page-locked ("pinned") memory while the host continues. With ordinary memory, a copy first waits
for all work that is queued for the device. The system can limit how much memory a process may lock (``ulimit -l``), and
some sandboxes (gVisor) lock none: then copies wait, and nothing else changes.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

log = logging.getLogger("automodel_ckpt")


_can_pin = True


def _pinned(tensor: Tensor) -> Tensor:
    """A copy of the CPU tensor *tensor* in page-locked memory; *tensor* itself if that fails.

    The first failure is logged, and the system is not asked again.
    """
    global _can_pin
    if not _can_pin:
        return tensor
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        _can_pin = False
        reason = str(error).splitlines()[0][:160]
        log.debug("page-locked memory is not available; copies to the GPU wait for it: %s", reason)
        return tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """*tensor* on *device*. A copy to CUDA is queued, and the host continues."""
    if device.type == "cuda" and tensor.is_cpu and not tensor.is_pinned():
        # PyTorch's allocator reuses this memory only after the copy.
        tensor = _pinned(tensor)
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Queue a copy of *tensor* to the host. Wait for the device before its values are read."""
    if tensor.is_cpu:
        return tensor
    target = _pinned(torch.empty(tensor.shape, dtype=tensor.dtype))
    return target.copy_(tensor, non_blocking=True)


class Mark:
    """A point in the work of a device: a CUDA event, or for a CPU the time on the host's clock."""

    def __init__(self, device: torch.device) -> None:
        """Mark the end of the work that is queued for *device*."""
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # blocking: a wait that polls would take a core from the processes that read data.
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when the device has done the work before this mark."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, start: Mark) -> float:
        """Seconds that the device worked from *start* to this mark. Call :meth:`wait` of this mark before."""
        if self._event is not None and start._event is not None:
            # In milliseconds.
            return float(start._event.elapsed_time(self._event)) / 1000
        return self._seconds - start._seconds
