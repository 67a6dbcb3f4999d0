"""The section ``dpo`` of the recipe file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from automodel_ckpt.config.tree.rules import NOT_EMPTY, POSITIVE, Condition, Rule, setting

_BELOW_HALF = Rule(lambda number: 0 <= number < 0.5, "from 0 to below 0.5")


@dataclass
class DPOConfig:
    """Training on preferred and rejected answers, in comparison with a reference model (DPO, arXiv:2305.18290)."""

    beta: float = setting(0.1, POSITIVE)
    """How strongly the policy is kept near the reference model. With loss ipo, the tau of its paper."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss of a pair: that of DPO (sigmoid), of IPO (arXiv:2310.12036, over mean log-probabilities of tokens), of SLiC
    (hinge, arXiv:2309.06657), or of robust DPO (robust, arXiv:2403.00409)."""
    label_smoothing: float = setting(0.0, _BELOW_HALF)
    """Probability that a preference is wrong, for the losses sigmoid and robust."""
    reference: str | None = setting(None, NOT_EMPTY)
    """Directory or Hub name of the reference model; null: the model that training starts from, with peft its base."""
    reference_revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in reference; null: the main branch."""
    precompute: bool = False
    """Compute the reference's log-probabilities of all pairs at each start. The reference is then not in
    memory during training."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("label_smoothing",),
            ("loss",),
            lambda dpo: dpo.loss in ("sigmoid", "robust"),
            "only the losses sigmoid and robust have it",
            "remove label_smoothing, or set loss sigmoid or robust",
        ),
        Condition(
            ("reference_revision",),
            ("reference",),
            lambda dpo: dpo.reference is not None,
            "without a name, the reference has the revision of the model",
            "set dpo.reference, or remove the key",
        ),
    )
