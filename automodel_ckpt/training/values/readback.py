"""The numbers of a step on their way from the device to the host, which does not wait for them.

A CPU computes while the host calls torch, so its numbers are known when a step returns. A GPU gets a queue of work. If
the host read a number of every step, such as the loss, the queue would be empty each time, and the GPU idle until the
host has added work. So the host reads the numbers of a step after it has queued the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from automodel_ckpt.base.device_copies import to_host
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.training.values.records import Control, StepPosition

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """A forward pass between two marks; *waits* are the intervals in it in which this rank waited for others.

    *num_tokens* is the number of elements of its rows, padding included.
    """

    start: Mark
    end: Mark
    waits: tuple[tuple[Mark, Mark], ...]
    num_tokens: int

    @property
    def seconds(self) -> float:
        """The rank's own seconds. The device must have done the work before the end."""
        waited = sum(end.seconds_since(start) for start, end in self.waits)
        return max(0.0, self.end.seconds_since(self.start) - waited)


class ForwardTimer:
    """Times the first forward pass of each step. It does not wait for the device: it only records marks."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Measure forward passes of *model*, whose modules get hooks."""
        self._device = device
        self._waits: list[tuple[Mark, Mark]] | None = None
        self._begin: Mark | None = None
        self._newest: ForwardTime | None = None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._surround(module)
            elif isinstance(module, DistributedDataParallel):
                module.register_forward_pre_hook(self._before_wait)
                module.module.register_forward_pre_hook(self._after_wait, prepend=True)

    def _surround(self, module: FSDPModule) -> None:
        """Measure the hook in which fsdp2 waits for the parameters of *module*, and no other hook."""
        hook = module._get_fsdp_state()._pre_forward_hook_handle
        owner = cast(nn.Module, module)
        hooks: Any = owner._forward_pre_hooks
        # If fsdp2 gathers several modules together, the first one has the hook.
        if hook is not None and hook.id in hooks:
            owner.register_forward_pre_hook(self._after_wait, prepend=True)
            hooks.move_to_end(hook.id, last=False)
            owner.register_forward_pre_hook(self._before_wait, prepend=True)

    def _before_wait(self, *_: Any) -> None:
        if self._waits is not None:
            self._begin = Mark(self._device)

    def _after_wait(self, *_: Any) -> None:
        if self._waits is not None and self._begin is not None:
            self._waits.append((self._begin, Mark(self._device)))
            self._begin = None

    @contextmanager
    def measuring(self, rows: Mapping[str, Any]) -> Iterator[None]:
        """Measure the forward pass of a micro-batch within the context, unless one of this step has been measured."""
        if self._newest is not None or self._waits is not None:
            yield
            return
        self._waits, self._begin = [], None
        start = Mark(self._device)
        try:
            yield
            self._newest = ForwardTime(
                start, Mark(self._device), tuple(self._waits), _num_tokens(rows)
            )
        finally:
            self._waits = None

    def measured(self, compute: Callable[..., _Result]) -> Callable[..., _Result]:
        """Return *compute*, whose first argument is a micro-batch, with its first call of a step measured."""

        def call(rows: Mapping[str, Any], *arguments: Any) -> _Result:
            with self.measuring(rows):
                return compute(rows, *arguments)

        return call

    def take(self) -> ForwardTime | None:
        """Return the time of this step, and begin a new step. None if nothing was computed."""
        newest, self._newest = self._newest, None
        return newest


def build_forward_timer(
    model: nn.Module, layout: RankLayout, config: RecipeConfig
) -> ForwardTimer | None:
    """Build what measures forward passes of *model* to find slow ranks; None if nothing does."""
    if config.hangs is None or layout.world_size == 1:
        return None
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    # Hooks would interrupt the graphs of compiled layers.
    if is_sharded and config.compile.enabled:
        return None
    return ForwardTimer(model, layout.device)


def _num_tokens(rows: Mapping[str, Any]) -> int:
    """Return the number of elements of the largest tensor of integers: token ids or labels, with padding."""
    sizes = [
        leaf.numel()
        for leaf in tree_leaves(dict(rows))
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()
    ]
    return max(sizes, default=0)


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
