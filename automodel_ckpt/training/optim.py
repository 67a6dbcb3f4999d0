"""The default optimizer, and which parameters any optimizer gets."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from automodel_ckpt.errors import RecipeError


def trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of *modules* that need gradients, each once."""
    parameters = (p for module in modules for p in module.parameters() if p.requires_grad)
    return list({id(p): p for p in parameters}.values())


def check_optimizer(optimizer: object, takes_own_steps: bool) -> None:
    """:class:`RecipeError` for what is no optimizer of torch's kind, or one (LBFGS) whose step has to be given a
    function that computes the loss anew, unless the recipe *takes_own_steps*."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(
            "the optimizer is not a torch.optim.Optimizer",
            where="optimizer",
            value=type(optimizer).__name__,
            hint="return one from this section's function or class",
        )
    needed = [
        p.name
        for p in inspect.signature(optimizer.step).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed and not takes_own_steps:
        raise RecipeError(
            "this optimizer evaluates the loss several times in a step, but the recipe computes it once",
            where="optimizer",
            value=f"{type(optimizer).__name__}.step({', '.join(needed)})",
            hint="use another optimizer, or override train_step in a recipe of your own",
        )


def check_sharding_support(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """:class:`RecipeError` where *error* came out of the optimizer's step and tells of an operation on sharded tensors
    that torch does not have."""
    inside = any(
        frame.f_locals.get("self") is optimizer
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    if inside and ("aten." in str(error) or "DTensor" in str(error)):
        raise RecipeError(
            "the optimizer cannot update sharded parameters",
            where="optimizer",
            value=f"{type(optimizer).__name__}: {str(error).splitlines()[0][:160]}",
            hint="use another one, such as torch.optim.AdamW or SGD, or distributed.strategy ddp, which does "
            "not shard parameters",
        ) from error


class FusedAdamW(torch.optim.AdamW):
    """torch's, its loops in C++ (five times faster than the others on a CPU); it can scale gradients as it reads them,
    which saves a pass over them.

    On a CPU the C++ is called at once, on this rank's parts, without the dispatch of each sharded tensor; and shards
    are scaled in the step too. Hooks and profilers get torch's own step.
    """

    grad_scale: torch.Tensor | None = None
    """What torch's fused step divides gradients by."""

    def __init__(self, params: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(params, **{"fused": True, **settings})

    @cached_property
    def _moments(self) -> dict[int, _Moments]:
        """By the group's index. Made anew for a copy of the optimizer, which has tensors of its own."""
        return {}

    def divide_in_step(self, divisor: float) -> None:
        """Let the next step divide all gradients by *divisor*."""
        self.grad_scale = torch.tensor(divisor, dtype=torch.float32)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or with *set_to_none* false make them zero."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients. Returns what a *closure* returns, which computes them."""
        if closure is None and not self._is_watched() and self._update_all():
            return None
        return self._step_of_torch(closure)

    # Else torch would wrap it in what calls hooks and names it to a profiler: a fifth of a small model's update.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_watched(self) -> bool:
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or torch._C._autograd._profiler_enabled()
        )

    @torch.no_grad()
    def _update_all(self) -> bool:
        """False, with nothing done, where only torch knows how."""
        known = [
            each for each in map(self._parts_of, range(len(self.param_groups))) if each is not None
        ]
        if len(known) < len(self.param_groups):
            return False
        for group, parts in zip(self.param_groups, known, strict=True):
            self._update(group, parts)
        self.grad_scale = None
        return True

    @torch.no_grad()
    def _step_of_torch(self, closure: Callable[[], float] | None) -> float | None:
        if self.grad_scale is not None:  # it is no DTensor, as the gradients may be
            gradients = [
                p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
            ]
            torch._foreach_div_(_here(gradients), self.grad_scale.item())
            self.grad_scale = None
        return _STEP_OF_TORCH(self, closure)  # type: ignore[no-any-return]

    def _parts_of(self, index: int) -> _Parts | None:
        """What the step of a group reads and writes on this rank. None for what only torch knows to do, off the CPU
        above all."""
        group, state = self.param_groups[index], self.state
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if (
            not group["fused"]
            or group["amsgrad"]
            or group["maximize"]
            or not all(map(_is_on_cpu, trained))
        ):
            return None
        entries = [state[parameter] for parameter in trained]
        moments = self._moments.get(index)
        if moments is None or not moments.are_of(entries):
            if not all(entries):
                self._init_group(group, *([] for _ in range(6)))  # type: ignore[no-untyped-call]
            moments = self._moments[index] = _Moments(entries)
        return moments.with_gradients(trained)

    def _update(self, group: dict[str, Any], parts: _Parts) -> None:
        if not parts.steps:
            return
        beta1, beta2 = group["betas"]
        parts.all_steps.add_(1)
        torch._fused_adamw_(
            parts.parameters,
            parts.gradients,
            parts.averages,
            parts.squares,
            [],
            parts.steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
        )


class _Parts(NamedTuple):
    """Of each parameter that has a gradient, this rank's part, and the number of its step, 0-dim; *all_steps* [N] holds
    these numbers."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    averages: list[torch.Tensor]
    squares: list[torch.Tensor]
    steps: list[torch.Tensor]
    all_steps: torch.Tensor


class _Moments:
    """The state of the parameters that a step updates, kept until it is another: to look all of it through takes a
    small model as long as half of the update, and so does to count the steps one by one. They come to lie in one
    tensor, so that one addition counts them."""

    def __init__(self, entries: list[dict[str, torch.Tensor]]) -> None:
        self._all_steps = (
            torch.stack([entry["step"] for entry in entries]) if entries else torch.zeros(0)
        )
        self._steps = list(self._all_steps.unbind())
        for entry, step in zip(entries, self._steps, strict=True):
            entry["step"] = step
        self._entries = entries
        self._averages = [entry["exp_avg"] for entry in entries]
        self._squares = [entry["exp_avg_sq"] for entry in entries]
        self._averages_here, self._squares_here = _here(self._averages), _here(self._squares)
        self._plain = all(
            map(_is_plain, chain(self._averages_here, self._squares_here, self._steps))
        )

    def are_of(self, entries: list[dict[str, torch.Tensor]]) -> bool:
        """Whether these are the *entries* of the optimizer's state, and in them the tensors that were there."""
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return (
            all(map(is_, map(_AVERAGE, entries), self._averages))
            and all(map(is_, map(_SQUARE, entries), self._squares))
            and all(map(is_, map(_STEP, entries), self._steps))
        )

    def with_gradients(self, trained: list[torch.Tensor]) -> _Parts | None:
        """None where torch has to see to the step."""
        gradients = [gradient for parameter in trained if (gradient := parameter.grad) is not None]
        if any(isinstance(parameter, DTensor) for parameter in trained):
            if not all(map(_alike, trained, gradients, self._averages, self._squares)):
                return None
            trained, gradients = _here(trained), _here(gradients)
        if not self._plain or not all(map(_is_plain, chain(trained, gradients))):
            return None
        return _Parts(
            trained,
            gradients,
            self._averages_here,
            self._squares_here,
            self._steps,
            self._all_steps,
        )


_AVERAGE, _SQUARE, _STEP = itemgetter("exp_avg"), itemgetter("exp_avg_sq"), itemgetter("step")
_is_on_cpu = attrgetter("is_cpu")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


_STEP_OF_TORCH: Any = torch.optim.Optimizer.profile_hook_step(
    inspect.unwrap(torch.optim.AdamW.step)
)


def _here(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _alike(*tensors: torch.Tensor) -> bool:
    """Whether all are cut in the same way among the same ranks, or none is."""
    layouts = [
        (each.device_mesh, each.placements) if isinstance(each, DTensor) else None
        for each in tensors
    ]
    return all(layout == layouts[0] for layout in layouts)


def adamw(
    params: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> FusedAdamW:
    """Fused AdamW in one parameter group."""
    return FusedAdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
