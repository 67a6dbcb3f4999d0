"""Odds ratio preference optimization (ORPO, arXiv:2403.07691): fine-tuning on preferred answers without a reference.

The loss of a pair is the loss of fine-tuning on the preferred answer, plus beta times a term. This term falls with the
odds of the preferred answer divided by the odds of the rejected one. The probability p of an answer is the geometric
mean of the probabilities of its tokens, and its odds are p / (1 - p).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_ckpt.config.keys.kinds import ORPOConfig
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.loss.causal import IGNORE_INDEX
from automodel_ckpt.recipes.preference import PairFinetune, PairObjective, label_counts
from automodel_ckpt.training.values.records import LossSum

_LOG_HALF = -0.6931471805599453


class ORPO(PairObjective):
    """The loss of pairs without a reference."""

    measures = (*(PairObjective.measures or ()), "sft_loss")
    section: ORPOConfig

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the loss of the pairs in *micro_batch*, summed."""
        rows = self.pair_rows(micro_batch)
        prompts = {**rows, "labels": _prompt_labels(rows)}
        answers, prompt = self.log_probs_of(rows, [rows["labels"], prompts["labels"]])
        counts = self._on_device(label_counts(rows))
        means = answers / counts.clamp(min=1)
        # A probability of 1 would have infinite odds, and so would rows without labels.
        highest = -torch.finfo(answers.dtype).tiny
        means = torch.where(counts > 0, means.clamp(max=highest), -1.0)
        odds = means - log1mexp(means)
        chosen, rejected = odds.view(-1, 2).unbind(1)
        ratios = F.logsigmoid(chosen - rejected)
        total, num_tokens = answers, counts
        if self.section.learn_prompt:
            total = answers + prompt
            num_tokens = counts + self._on_device(label_counts(prompts))
        sft_losses = -(total / num_tokens.clamp(min=1))[::2]
        losses = sft_losses - self.section.beta * ratios
        rewards = self.section.beta * means
        return self.summed(losses, rewards, micro_batch, sft_loss=sft_losses.detach().float())


def _prompt_labels(rows: Tensors) -> Tensor:
    """Labels [B, T] on the tokens that have none in *rows*, of the preferred rows only."""
    labels = torch.where(rows["labels"] == IGNORE_INDEX, rows["input_ids"], IGNORE_INDEX)
    if "attention_mask" in rows:
        labels = labels.masked_fill(rows["attention_mask"] == 0, IGNORE_INDEX)
    labels[1::2] = IGNORE_INDEX
    return labels


def log1mexp(log_probs: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) of log-probabilities x < 0, without loss of precision near 0 and for large -x.

    Source of both forms: Martin Maechler, "Accurately Computing log(1 - exp(-|a|))", 2012.
    """
    is_large = log_probs > _LOG_HALF
    # Each form gets arguments at which its gradient is finite, also where the other one is used.
    large = torch.where(is_large, log_probs, -1.0)
    small = torch.where(is_large, -1.0, log_probs)
    near = torch.log(-torch.expm1(large))
    far = torch.log1p(-torch.exp(small))
    return torch.where(is_large, near, far)


class ORPOFinetune(PairFinetune):
    """Trains ``model`` on the preferred answers of ``dataset``, and to prefer them to the rejected ones."""

    objective_class = ORPO

    section_key, section_class = "orpo", ORPOConfig
