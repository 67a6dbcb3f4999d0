"""The default optimizer, and which parameters any optimizer gets."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from automodel_ckpt.errors import RecipeError


def trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of *modules* that need gradients, each once."""
    parameters = (p for module in modules for p in module.parameters() if p.requires_grad)
    return list({id(p): p for p in parameters}.values())


def refuse_unsteppable(optimizer: object, takes_own_steps: bool) -> None:
    """:class:`RecipeError` for what is no optimizer of torch's kind, or one (LBFGS) whose step has to be given a
    function that computes the loss anew, unless the recipe *takes_own_steps*."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(
            "the optimizer is not a torch.optim.Optimizer",
            where="optimizer",
            value=type(optimizer).__name__,
            remedy="let this section's function or class make one",
        )
    needed = [p.name for p in inspect.signature(optimizer.step).parameters.values() if p.default is p.empty
              and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    if needed and not takes_own_steps:
        raise RecipeError(
            "this optimizer evaluates the loss several times in a step, and the recipe computes it once",
            where="optimizer",
            value=f"{type(optimizer).__name__}.step({', '.join(needed)})",
            remedy="use another optimizer, or override train_step in a recipe of your own",
        )


def refuse_unsharded(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """:class:`RecipeError` where *error* came out of the optimizer's step and tells of an operation on sharded tensors
    that torch does not have."""
    inside = any(frame.f_locals.get("self") is optimizer for frame, _ in traceback.walk_tb(error.__traceback__))
    if inside and ("aten." in str(error) or "DTensor" in str(error)):
        raise RecipeError(
            "the optimizer cannot update sharded parameters",
            where="optimizer",
            value=f"{type(optimizer).__name__}: {str(error).splitlines()[0][:160]}",
            remedy="use another one, such as torch.optim.AdamW or SGD, or distributed.strategy ddp, where parameters "
            "are whole",
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
        parts = [self._parts_of(group) for group in self.param_groups]
        known = [each for each in parts if each is not None]
        if len(known) < len(parts):
            return False
        for group, part in zip(self.param_groups, known, strict=True):
            self._update(group, part)
        self.grad_scale = None
        return True

    @torch.no_grad()
    def _step_of_torch(self, closure: Callable[[], float] | None) -> float | None:
        if self.grad_scale is not None:  # it is no DTensor, as the gradients may be
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_div_(_here(gradients), self.grad_scale.item())
            self.grad_scale = None
        return _STEP_OF_TORCH(self, closure)  # type: ignore[no-any-return]

    def _parts_of(self, group: dict[str, Any]) -> list[list[torch.Tensor]] | None:
        """This rank's parts of what has a gradient in *group*: parameters, gradients, averages, averages of squares,
        and the numbers of their steps. None for what only torch knows to do, off the CPU above all."""
        if not group["fused"] or group["amsgrad"] or group["maximize"]:
            return None
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in trained]
        if not all(states):
            self._init_group(group, *([] for _ in range(6)))  # type: ignore[no-untyped-call]
        values = [trained, [parameter.grad for parameter in trained]]
        values += [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
        if any(isinstance(parameter, DTensor) for parameter in trained):
            if not all(_alike(*tensors) for tensors in zip(*values, strict=True)):
                return None
            values = [_here(tensors) for tensors in values]
        values.append([state["step"] for state in states])
        plain = all(tensor.is_cpu and tensor.is_contiguous() for tensors in values for tensor in tensors)
        return values if plain else None

    def _update(self, group: dict[str, Any], parts: list[list[torch.Tensor]]) -> None:
        parameters, gradients, averages, squares, steps = parts
        if not steps:
            return
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters, gradients, averages, squares, [], steps,
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=self.grad_scale,
        )  # fmt: skip


_STEP_OF_TORCH: Any = torch.optim.Optimizer.profile_hook_step(inspect.unwrap(torch.optim.AdamW.step))


def _here(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _alike(*tensors: torch.Tensor) -> bool:
    """Whether all are cut in the same way among the same ranks, or none is."""
    layouts = [(each.device_mesh, each.placements) if isinstance(each, DTensor) else None for each in tensors]
    return all(layout == layouts[0] for layout in layouts)


def adamw(
    params: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> FusedAdamW:
    """Fused AdamW in one parameter group."""
    return FusedAdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
