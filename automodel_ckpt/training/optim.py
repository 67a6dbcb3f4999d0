"""The default optimizer, and which parameters any optimizer gets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of *modules* that need gradients, each once."""
    parameters = (p for module in modules for p in module.parameters() if p.requires_grad)
    return list({id(p): p for p in parameters}.values())


def adamw(
    params: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW in one parameter group (its loops run in C++: five times faster than the others on a CPU)."""
    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
