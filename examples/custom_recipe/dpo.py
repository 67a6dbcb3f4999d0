"""A custom recipe: direct preference optimization (DPO, arXiv:2305.18290) against a frozen reference model."""

from dataclasses import dataclass, replace

import torch.nn.functional as F

from automodel_ckpt.config.rules import POSITIVE, setting
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.objective import Objective
from automodel_ckpt.recipes.records import LossSum
from automodel_ckpt.training.loss import shift_labels


@dataclass
class DPOConfig(RecipeConfig):
    beta: float = setting(0.1, POSITIVE)
    """How strongly the policy is kept near the reference model."""


def preferences(samples):
    """Pairs of samples: a text, which is preferred, and the same tokens in reverse order."""
    return [(s, {name: s[name][::-1] for name in ("input_ids", "labels")}) for s in samples]


class DPO(Objective):
    """The loss of pairs of rows. Even rows are preferred to the rows after them."""

    terms = "pairs"
    measures = ("accuracy",)

    def size_of(self, micro_batch):
        num_pairs = int(has_labels(micro_batch).sum())
        return replace(super().size_of(micro_batch), count=num_pairs)

    def loss(self, micro_batch):
        rows = self.rows_of(micro_batch)
        # The reference is frozen: it has no gradients.
        gain = self.log_probs(rows, self.trainable) - self.log_probs(rows, self.reference)
        margin = self.beta * (gain[::2] - gain[1::2])
        margin = margin[has_labels(micro_batch)]
        return LossSum(-F.logsigmoid(margin).sum(), {"accuracy": (margin > 0).sum()})

    def log_probs(self, rows, trainable):
        """The log-probability [B] of the labeled tokens of each row."""
        logits = self.logits(rows, trainable).float()
        labels = shift_labels(rows["labels"]).to(logits.device)
        return -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(dim=1)


def has_labels(micro_batch):
    return (micro_batch["labels"][::2] != -100).any(dim=1)


class DPOFinetune(LLMFinetune):
    Config = DPOConfig
    objective_class = DPO
    shares_rows = False  # a row is one answer
    sample_noun = "pair"
    rows_per_sample = 2

    def build(self):
        super().build()
        self.reference = self.build_trainable(is_trained=False)

    def build_dataset(self, section):
        return preferences(super().build_dataset(section))

    def build_collate_fn(self):
        collate = super().build_collate_fn()
        return lambda pairs: collate([sample for pair in pairs for sample in pair])

    def build_objective(self):
        objective = super().build_objective()
        objective.reference, objective.beta = self.reference, self.config.beta
        return objective
