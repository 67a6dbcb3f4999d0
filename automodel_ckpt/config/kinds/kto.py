"""The section ``kto`` of the recipe file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from automodel_ckpt.config.tree.rules import (
    FINITE,
    NOT_EMPTY,
    POSITIVE,
    Condition,
    Relation,
    setting,
)


@dataclass
class KTOConfig:
    """Training on completions that are judged one by one (KTO, arXiv:2402.01306)."""

    beta: float = setting(0.1, POSITIVE)
    """How strongly the policy is kept near the reference model."""
    desirable_weight: float = setting(1.0, FINITE)
    """Factor of the loss of desirable completions."""
    undesirable_weight: float = setting(1.0, FINITE)
    """Factor of the loss of undesirable completions."""
    reference: str | None = setting(None, NOT_EMPTY)
    """Directory or Hub name of the reference model; null: the model that training starts from, with peft its base."""
    reference_revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in reference; null: the main branch."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("desirable_weight", "undesirable_weight"),
            lambda kto: kto.desirable_weight > 0 or kto.undesirable_weight > 0,
            "with both weights 0, the loss is 0 and nothing is trained",
            "set one of them to more than 0, such as the default 1.0",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("reference_revision",),
            ("reference",),
            lambda kto: kto.reference is not None,
            "without a name, the reference has the revision of the model",
            "set kto.reference, or remove the key",
        ),
    )
