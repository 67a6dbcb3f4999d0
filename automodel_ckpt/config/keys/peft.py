"""The section ``peft``: adapters on a frozen base."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_1,
    BELOW_1,
    Relation,
    Rule,
    setting,
)

_NUMBERS_BY_NAME = Rule(
    lambda numbers: all(type(number) is int and number >= 1 for number in numbers.values()),
    "a mapping from names of layers to whole numbers of 1 or more",
)


@dataclass
class PeftConfig:
    """LoRA adapters on a frozen base model, with the peft library. Without this section the model itself is trained."""

    method: Literal["lora"] = "lora"
    """Type of adapter."""
    r: int = setting(8, AT_LEAST_1)
    """LoRA rank."""
    alpha: int = setting(16, AT_LEAST_1)
    """LoRA alpha. The adapter's output is scaled by alpha / r, or by alpha / sqrt(r) with use_rslora."""
    rank_pattern: dict[str, Any] = field(
        default_factory=dict, metadata={"rules": (_NUMBERS_BY_NAME,)}
    )
    """Ranks of some layers of target_modules, by name or glob pattern; the first that matches a layer is used."""
    alpha_pattern: dict[str, Any] = field(
        default_factory=dict, metadata={"rules": (_NUMBERS_BY_NAME,)}
    )
    """Alphas of some layers of target_modules, by name or glob pattern; the first that matches a layer is used."""
    dropout: float = setting(0.0, BELOW_1)
    """Dropout probability of the adapter's input during training."""
    target_modules: list[str] | str = "all-linear"
    """Layers to adapt: names (q_proj), glob patterns over full names (*.self_attn.*), or all-linear."""
    target_parameters: list[str] | str = field(default_factory=list)
    """Weights of fused experts to adapt (3 dimensions): names (gate_up_proj), glob patterns over full names
    (*.experts.*), or all-experts: all that the model has, which can be none."""
    exclude_modules: list[str] = field(default_factory=list)
    """Layers to exclude from target_modules: names or glob patterns."""
    exclude_if_present: list[str] = field(default_factory=list)
    """Layers to exclude as with exclude_modules, except that a pattern may match none of the model's layers."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules to train and save in full, such as lm_head: names or glob patterns."""
    use_dora: bool = False
    """Use DoRA (weight-decomposed low-rank adaptation)."""
    use_rslora: bool = False
    """Use rsLoRA (rank-stabilized scaling)."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Initialization of the adapters. With default and gaussian the initial output equals the base's."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the base to train: none, all, or those of adapted layers (lora_only)."""
    ensure_weight_tying: bool = True
    """Keep a tied embedding and output layer tied if one is in modules_to_save; false: allow LoRA on either."""
    dtype: Literal["float32", "base"] = "float32"
    """Data type of the adapters; base: that of the base model."""
    base_dir: str | None = None
    """With model.from_config: the directory where the first start writes the randomly initialized base."""
    quantize_base: Literal["nf4", "fp4", "int8"] | None = None
    """Quantize the frozen base (QLoRA). Requires a CUDA device and bitsandbytes."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("init", "r", "rank_pattern"),
            lambda peft: (
                peft.init != "orthogonal"
                or all(rank % 2 == 0 for rank in (peft.r, *peft.rank_pattern.values()))
            ),
            "init orthogonal needs even ranks (r and rank_pattern)",
            "use even ranks, or remove init",
        ),
        Relation(
            ("dropout", "use_dora", "init", "target_parameters"),
            lambda peft: (
                not peft.target_parameters
                or (peft.dropout == 0 and not peft.use_dora and peft.init != "orthogonal")
            ),
            "adapters on target_parameters support no dropout, no use_dora, and no init orthogonal",
            "remove that key, or target_parameters",
        ),
    )
