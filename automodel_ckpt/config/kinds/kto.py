"""The section ``kto`` of the recipe file."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.config.rules import FINITE, NOT_EMPTY, POSITIVE, setting


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
