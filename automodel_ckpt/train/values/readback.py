"""The numbers of a step on their way from the device to the host, which does not wait for them.

A CPU computes while the host calls torch, so its numbers are known when a step returns. A GPU gets a queue of work. If
the host read a number of every step, such as the loss, the queue would be empty each time, and the GPU idle until the
host has added work. So the host reads the numbers of a step after it has queued the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from automodel_ckpt.base.device_copies import to_host
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.train.values.records import Control, StepPosition

if TYPE_CHECKING:
    from automodel_ckpt.train.values.forward_time import ForwardTime

Number = float | torch.Tensor
"""A number of a step: on the host, or a 0-dim tensor."""


def runs_ahead(device_type: str) -> bool:
    """Whether the host queues work for a device of this type and continues, instead of computing it."""
    return device_type != "cpu"


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

    def is_past(self) -> bool:
        """Whether the device has done the work before this mark. It does not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, start: Mark) -> float:
        """Seconds that the device worked from *start* to this mark. Call :meth:`wait` of this mark before."""
        if self._event is not None and start._event is not None:
            # In milliseconds.
            return float(start._event.elapsed_time(self._event)) / 1000
        return self._seconds - start._seconds


class Readback:
    """Copies numbers from the device to the host while the device continues."""

    def __init__(self, numbers: Mapping[str, Number], device: torch.device) -> None:
        """Queue the copies of *numbers*. Those that are not on *device* are on the host already."""
        self._known: dict[str, float] = {}
        self._names: list[str] = []
        tensors = []
        for name, number in numbers.items():
            value = number.full_tensor() if isinstance(number, DTensor) else number
            if isinstance(value, torch.Tensor) and value.device.type == device.type:
                self._names.append(name)
                # float64 holds every value of the smaller types.
                tensors.append(value.detach().double().reshape(()))
            else:
                self._known[name] = float(value)
        self._copies = torch.empty(0, dtype=torch.float64)
        if tensors:
            self._copies = to_host(torch.stack(tensors))
        self.end = Mark(device)
        """The end of the step."""

    def read(self) -> dict[str, float]:
        """Wait for the copies, and return all numbers."""
        self.end.wait()
        copied = dict(zip(self._names, self._copies.tolist(), strict=True))
        return {**self._known, **copied}


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued: what is known of it on the host, and its numbers on their way from the device.

    *numbers* has this rank's sums ``loss`` and ``aux_loss``, the ``grad_norm``, and this rank's sums of the objective's
    metrics, whose names are *metrics*. *may_be_skipped*: the device decides whether the weights change.
    """

    position: StepPosition
    batch: GlobalBatch
    control: Control
    lr: float
    start: Mark
    numbers: Readback
    metrics: Sequence[str]
    may_be_skipped: bool
    forward: ForwardTime | None = None
    """The time of a forward pass on this rank; None if it is not measured."""
