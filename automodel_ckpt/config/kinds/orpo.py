"""The section ``orpo`` of the recipe file."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.config.tree.rules import POSITIVE, setting


@dataclass
class ORPOConfig:
    """Fine-tuning on preferred answers, with a penalty for rejected ones (ORPO, arXiv:2403.07691)."""

    beta: float = setting(0.1, POSITIVE)
    """Weight of the odds ratio of both answers, beside the loss of the preferred one."""
    learn_prompt: bool = True
    """Include the prompt of the preferred answer in its loss, as the authors of ORPO and TRL do."""
