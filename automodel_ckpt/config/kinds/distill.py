"""The section ``distill`` of the recipes ``distill`` and ``vlm_distill``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_1,
    FRACTION,
    MISSING,
    NOT_EMPTY,
    POSITIVE,
    Condition,
    Target,
    setting,
)


@dataclass
class TeacherConfig:
    """The model whose predictions the student learns. It is not trained and not saved."""

    from_pretrained: str = setting(MISSING, NOT_EMPTY)
    """Directory or Hub name of a pretrained Hugging Face model with the tokenizer of the student, and for vlm_distill
    with the same settings of images."""
    revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in from_pretrained; null: the main branch."""
    trust_remote_code: bool = False
    """Allow the model's repository to supply its code, for types that transformers does not include. Has an effect only
    with --trust trust_remote_code on the command line."""
    dtype: Literal["float32", "bfloat16", "float16", "float64", "auto"] | None = None
    """Data type of the parameters; auto: the type in the model's config.json; null: 16 bits on a GPU, else float32."""
    attn_implementation: str | None = None
    """Attention implementation: eager, sdpa, flash_attention_2, ...; null lets transformers choose."""


@dataclass
class DistillConfig:
    """Knowledge distillation: the model (the student) learns to predict what a teacher predicts.

    The loss of a label is (1 - kd_ratio) * cross-entropy + kd_ratio * temperature**2 * divergence.
    """

    teacher: TeacherConfig | Target = field(default_factory=TeacherConfig)
    """The model whose predictions are learned: a directory or Hub name, or a plug-in with _target_."""
    divergence: Literal["forward_kl", "reverse_kl", "mixed"] = "forward_kl"
    """What the student minimizes: forward_kl is KL(teacher || student), reverse_kl is KL(student || teacher), mixed is
    a weighted mean of both."""
    reverse_weight: float = setting(0.5, FRACTION)
    """Weight of the reverse divergence in divergence: mixed; the forward one has the rest."""
    kd_ratio: float = setting(0.5, FRACTION)
    """Share of the divergence in the loss; 0: cross-entropy alone, 1: no cross-entropy."""
    temperature: float = setting(1.0, POSITIVE)
    """Both models' logits are divided by it before the softmax of the divergence. Above 1, less probable tokens count
    more."""
    offload_teacher: bool = False
    """Keep the teacher's weights in the memory of the host while they are not used; without a GPU, no effect."""
    top_k: int | None = setting(None, AT_LEAST_1)
    """Compute the teacher's k most probable tokens for all data before training and keep them in a cache; later starts
    do not load the teacher. null: complete logits, computed in each step."""
    cache_dir: str | None = setting(None, NOT_EMPTY)
    """Directory of these caches, which all nodes can read; null: $AUTOMODEL_CKPT_CACHE if set, else
    ~/.cache/automodel_ckpt."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("reverse_weight",),
            ("divergence",),
            lambda section: section.divergence == "mixed",
            "only divergence: mixed has two weights",
            "set divergence: mixed, or remove the key",
        ),
        Condition(
            ("cache_dir",),
            ("top_k",),
            lambda section: section.top_k is not None,
            "without top_k, nothing is cached",
            "set distill.top_k, or remove cache_dir",
        ),
    )
