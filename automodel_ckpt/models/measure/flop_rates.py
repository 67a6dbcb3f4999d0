"""The operations of matrix products and of attention; which positions a layer attends to, by its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from automodel_ckpt.models.config_values import config_of_layer

Lengths = np.ndarray[Any, Any]
Pairs = tuple[tuple[int, int | None], ...]
"""Operations per pair of a query and a key, with the largest number of keys of a query; None: all of the document."""


def product_operations(module: nn.Module, size: int, *, has_gradient: bool) -> int:
    """The operations for *size* multiplications: forward, gradient of the weight, and gradient of the input."""
    passes = 1 + has_gradient + (size > 0 and has_trained_weight(module))
    return 2 * size * passes


def has_trained_weight(module: nn.Module) -> bool:
    """Whether a parameter of *module* itself, without its submodules, is trained."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def attention_operations(lengths: Lengths, pairs: Pairs) -> int:
    """The operations of attention in documents of *lengths*."""
    total = 0
    for per_pair, window in pairs:
        num_keys = lengths if window is None else np.minimum(lengths, window)
        total += per_pair * int(np.dot(lengths, num_keys))
    return total


def layer_kinds(text: Any, num_layers: int) -> Sequence[str]:
    """The kind of each decoder layer, as the configuration names it."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(text, name, None)
        if kinds:
            return list(kinds)
    found = []
    for number in range(num_layers):
        layer = config_of_layer(text, number)
        window = getattr(layer, "sliding_window", None)
        is_windowed = window and getattr(layer, "use_sliding_window", True)
        found.append("sliding_attention" if is_windowed else "full_attention")
    return found


def is_attention(kind: str) -> bool:
    """Whether a layer of this *kind* compares all pairs of positions: not a linear attention or state-space layer."""
    return "attention" in kind and "linear" not in kind


def window_of(text: Any, kind: str) -> int | None:
    """The largest number of keys of a query in a layer of this *kind*; None: no limit."""
    name = "attention_chunk_size" if "chunked" in kind else "sliding_window"
    if "sliding" not in kind and "chunked" not in kind:
        return None
    size = getattr(text, name, None)
    return size if isinstance(size, int) else None
