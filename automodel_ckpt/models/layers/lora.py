"""What a recipe's ``peft`` section says of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from automodel_ckpt.checkpoint.files.type_aliases import Counts

ALL_LINEAR = "all-linear"
ALL_EXPERTS = "all-experts"
ADAPTER_NAME = "default"
"""The name that peft gives to the only adapter of a model."""


@dataclass(frozen=True)
class Lora:
    """The kind and the location of adapters. The fields are the keys of a recipe's ``peft`` section."""

    r: int = 8
    alpha: int = 16
    rank_pattern: Counts = field(default_factory=dict)
    alpha_pattern: Counts = field(default_factory=dict)
    dropout: float = 0.0
    target_modules: Sequence[str] | str = ALL_LINEAR
    target_parameters: Sequence[str] | str = ()
    exclude_modules: Sequence[str] = ()
    exclude_if_present: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    use_dora: bool = False
    use_rslora: bool = False
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    bias: Literal["none", "all", "lora_only"] = "none"
    ensure_weight_tying: bool = True
    dtype: Literal["float32", "base"] = "float32"
