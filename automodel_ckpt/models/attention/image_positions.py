"""The rotary positions of image tokens, in models that compute them from the sizes of images (Qwen-VL, GLM-4V, ...)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

PositionsOf = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


def rotary_positions(model: nn.Module) -> PositionsOf | None:
    """Return a function that computes the positions [3, samples, L] of a padded batch; None when they are the positions
    of text.

    transformers' models call it themselves for a batch with one sample per row, but not for rows with several samples.
    """
    for module in model.modules():
        method: Any = getattr(module, "get_rope_index", None)
        if callable(method):
            return _PositionsByModel(method)
    return None


class _PositionsByModel:
    """Calls a model's ``get_rope_index`` with those tensors of a batch that it takes."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.names = frozenset(inspect.signature(method).parameters)

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        arguments = {name: tensor for name, tensor in batch.items() if name in self.names}
        positions, _ = self.method(**arguments)
        found: torch.Tensor = positions
        return found
