"""The section ``reward_model`` of the recipe file."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.config.tree.rules import FINITE, setting


@dataclass
class RewardModelConfig:
    """Training a model that scores texts, on preferred and rejected answers (Bradley-Terry, arXiv:2203.02155)."""

    center_coefficient: float = setting(0.0, FINITE)
    """Factor of the squared sum of both scores of a pair, which keeps scores around 0 (arXiv:2312.09244); 0: none."""
