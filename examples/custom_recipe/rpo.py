"""A custom recipe: DPO with the loss of fine-tuning on the preferred answers beside it (RPO, arXiv:2404.19733)."""

from dataclasses import dataclass, field

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import FINITE, setting
from automodel_ckpt.recipes.dpo import DPO, DPOFinetune


@dataclass
class RPOSection:
    sft_weight: float = setting(1.0, FINITE)
    """Weight of the loss of fine-tuning, a mean over the tokens of the preferred answer."""


@dataclass
class RPOConfig(RecipeConfig):
    rpo: RPOSection = field(default_factory=RPOSection)


class RPO(DPO):
    """Keeps the preferred answers probable, which the difference of two answers alone does not."""

    def pair_losses(self, log_probs, gains, num_labels):
        losses = super().pair_losses(log_probs, gains, num_labels)
        # Even rows are the preferred ones.
        sft_losses = -(log_probs / num_labels)[::2]
        return losses + self.sft_weight * sft_losses


class RPOFinetune(DPOFinetune):
    Config = RPOConfig
    objective_class = RPO

    def build_objective(self):
        objective = super().build_objective()
        objective.sft_weight = self.config.rpo.sft_weight
        return objective
