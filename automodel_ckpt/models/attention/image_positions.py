"""The rotary positions of image tokens, in models that compute them from the sizes of images (Qwen-VL, GLM-4V, ...)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

PositionsOf = Callable[[Mapping[str, Tensor]], Tensor]


def rotary_positions(model: nn.Module) -> PositionsOf | None:
    """Return a function that computes the positions [3, samples, L] of a padded batch.

    transformers' models call it themselves for a batch with one sample per row, but not for rows with several samples.
    Returns None when the positions are a text's positions.
    """
    for module in model.modules():
        method: Any = getattr(module, "get_rope_index", None)
        if callable(method):
            return functools.partial(_positions, method, inspect.signature(method).parameters)
    return None


def _positions(
    method: Callable[..., Any], names: Collection[str], batch: Mapping[str, Tensor]
) -> Tensor:
    """Call a model's ``get_rope_index`` with those tensors of a batch that it takes."""
    positions: Tensor
    positions, _ = method(**{name: tensor for name, tensor in batch.items() if name in names})
    return positions
