"""The sections ``optimizer``, ``lr_scheduler`` and ``ema``: what updates the weights, and their average."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_0_OR_AUTO,
    AT_LEAST_1,
    BELOW_1,
    BETAS,
    FINITE,
    FRACTION,
    NOT_EMPTY,
    Relation,
    Target,
    setting,
)

_INHERITED = ("lr", "weight_decay", "betas", "eps")
"""Settings that a group with its own optimizer can get from the section."""


@dataclass
class OptimizerGroup:
    """Parameters with their own options for fused AdamW; a null option uses the value of the optimizer section."""

    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Parameters of the group: glob patterns, or hidden_matrices, vision_tower, projector, language_model."""
    lr: float | None = setting(None, FINITE)
    """Peak learning rate."""
    betas: tuple[float, float] | None = setting(None, BETAS)
    """Decay rates of the running averages of the gradient and its square."""
    eps: float | None = setting(None, FINITE)
    """Term added to the denominator for numerical stability."""
    weight_decay: float | None = setting(None, FINITE)
    """Decoupled weight decay of all parameters of the group; no_decay does not apply to them."""


@dataclass
class OptionsGroup:
    """Parameters with their own options for an optimizer given by ``_target_``."""

    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Parameters of the group: glob patterns, or hidden_matrices, vision_tower, projector, language_model."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The other keys: options of the optimizer."""

    takes_any: ClassVar[bool] = True


@dataclass
class TargetGroup(Target):
    """Parameters with their own optimizer, such as torch.optim.Muon for matrices. Arguments that it does not set have
    the values of the optimizer section, if its class takes them."""

    # kw_only, because a required field cannot follow the defaults of Target otherwise.
    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Parameters of the group: glob patterns, or hidden_matrices, vision_tower, projector, language_model."""


@dataclass
class OptimizerConfig:
    """Fused AdamW."""

    lr: float = setting(1e-4, FINITE)
    """Peak learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.999), BETAS)
    """Decay rates of the running averages of the gradient and its square."""
    eps: float = setting(1e-8, FINITE)
    """Term added to the denominator for numerical stability."""
    weight_decay: float = setting(0.01, FINITE)
    """Decoupled weight decay."""
    no_decay: Literal["auto", "none"] | list[str] | None = "auto"
    """Parameters without weight decay: auto (norms and biases), none, or a list of glob patterns."""
    groups: list[OptimizerGroup | TargetGroup] = field(
        default_factory=list, metadata={"supplied": ("params", *_INHERITED)}
    )
    """Parameter groups with their own options or optimizer; the first match wins: [{params: ['*.bias'], lr: 1e-5}]."""
    on_resume: Literal["checkpoint", "recipe"] = "checkpoint"
    """Where a resumed run takes its optimizer options and peak learning rates from."""


@dataclass
class OptimizerTarget(Target):
    """An optimizer given by ``_target_``, with the options of all parameters outside of groups."""

    no_decay: Literal["auto", "none"] | list[str] | None = "auto"
    """Parameters without weight decay: auto (norms and biases; none if _target_ is a function), none, or globs."""
    groups: list[OptionsGroup | TargetGroup] = field(
        default_factory=list, metadata={"supplied": ("params", *_INHERITED)}
    )
    """Parameter groups with their own options or optimizer."""
    on_resume: Literal["checkpoint", "recipe"] = "checkpoint"
    """Where a resumed run takes its optimizer options and peak learning rates from."""


@dataclass
class LRSchedulerConfig:
    """Learning rate schedule from transformers. Without this section the learning rate is constant."""

    name: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = "cosine"
    """Name of the schedule."""
    warmup_steps: Literal["auto"] | int | None = setting(None, AT_LEAST_0_OR_AUTO)
    """Warmup, in optimizer steps; auto: a tenth of the steps of the run, at most 1000."""
    warmup_ratio: float | None = setting(None, FRACTION)
    """Warmup, as a fraction of all optimizer steps, rounded up."""
    warmup_from: float = setting(0.0, BELOW_1)
    """Rate at which the warmup begins, as a fraction of the full rate."""
    decay_steps: int | None = setting(None, AT_LEAST_1)
    """Length of the schedule in optimizer steps; null: all steps of the run."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the schedule, such as num_cycles or min_lr."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("warmup_steps", "warmup_ratio"),
            lambda schedule: schedule.warmup_steps is None or schedule.warmup_ratio is None,
            "warmup_steps and warmup_ratio cannot be combined",
            "remove one of them",
        ),
        Relation(
            ("warmup_from", "warmup_steps", "warmup_ratio"),
            lambda schedule: (
                not schedule.warmup_from or schedule.warmup_steps or schedule.warmup_ratio
            ),
            "warmup_from needs a warmup",
            "set warmup_steps or warmup_ratio, or remove warmup_from",
        ),
    )


@dataclass
class EmaConfig:
    """An exponential moving average of the trained weights, saved and exported next to the model."""

    decay: float = setting(0.999, BELOW_1)
    """Share of the old average that an update keeps; the present weights have the rest."""
    start_step: int = setting(1, AT_LEAST_0)
    """Until this step, the average equals the weights; 0: it begins with the initial weights."""
    update_every_steps: int = setting(1, AT_LEAST_1)
    """Update the average after each step that is a multiple of N."""
    validate: bool = False
    """Validate with the average instead of the trained weights. The metrics keep their names."""
