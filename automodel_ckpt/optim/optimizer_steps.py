"""The loop over parameters that optimizers with one update per parameter share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Update = Callable[[torch.Tensor, dict[str, Any]], None]
"""Updates a parameter, with the options of its group."""


def update_each(
    optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None, update: Update
) -> float | None:
    """Call *update* for each parameter of *optimizer* that has a gradient.

    Returns the result of *closure*, which computes the gradients; None without one.
    """
    loss = loss_of(closure)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                update(parameter, group)
    return loss


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return the result of *closure*, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
