"""The default optimizer, and which parameters any optimizer gets."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

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


class FusedAdamW(torch.optim.AdamW):
    """torch's, its loops in C++ (five times faster than the others on a CPU); it can scale gradients as it reads them,
    which saves a pass over them."""

    grad_scale: torch.Tensor | None = None
    """What torch's fused step divides gradients by."""

    def __init__(self, params: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(params, **{"fused": True, **settings})
        self.register_step_post_hook(_forget_scale)

    def divide_in_step(self, divisor: float) -> None:
        """Let the next step divide all gradients by *divisor*."""
        self.grad_scale = torch.tensor(divisor, dtype=torch.float32)


def _forget_scale(optimizer: Any, *_: Any) -> None:
    optimizer.grad_scale = None


def adamw(
    params: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> FusedAdamW:
    """Fused AdamW in one parameter group."""
    return FusedAdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
