"""How long a rank computes a forward pass, without the time in which it waits for other ranks.

Collectives let all ranks take as long as the slowest one, so the time of a step does not show which rank that is.
Within a forward pass, ranks wait where parameters are gathered (fsdp2) or buffers are copied (DDP). What is left is the
rank's own time. It also contains waits for the ranks of a tensor or context parallel group, which are slow together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.train.values.readback import Mark

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
