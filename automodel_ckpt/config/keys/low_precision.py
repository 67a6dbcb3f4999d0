"""The sections ``qat`` and ``fp8``: linear layers that compute with fewer bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    setting,
)


@dataclass
class QatConfig:
    """Quantization-aware training: linear layers compute as after a quantized export, and learn to compensate."""

    scheme: Literal["FP8_DYNAMIC", "W8A8", "W8A16", "W4A16", "W4A8"] = "W4A16"
    """Bits of weights (W) and of inputs (A); the schemes of `ckpt export --to compressed-tensors`, and W4A8."""
    group_size: int | None = setting(None, AT_LEAST_1)
    """Columns of a weight that share a scale; null: 128 (W4A16, W8A16, W4A8), else all columns of a row."""
    start_step: int = setting(0, AT_LEAST_0)
    """Number of steps that are trained without rounding first."""


@dataclass
class Fp8Config:
    """Training with matrix products in FP8: linear layers of the decoder compute through torchao (extra `fp8`)."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Scales: tensorwise: one per tensor (fastest); rowwise: one per row (more exact); rowwise_with_gw_hp: rowwise,
    with gradients of weights in the dtype of mixed_precision."""
    exclude: list[str] = field(default_factory=list)
    """Globs of names of layers that do not compute in FP8, such as '*.down_proj'."""
    emulate: bool = False
    """Compute the rounded values in higher precision: slow, for tests on devices without FP8."""
