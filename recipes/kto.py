"""KTO: fine-tuning on completions that are judged one by one as desirable or undesirable (arXiv:2402.01306).

The reward of a completion is beta times the logarithm of how much more probable it is under the trained model than
under the reference. The loss compares it with a point of reference: beta times an estimate of the KL divergence of the
two models, which is the mean gain of completions that follow the prompts of other samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from automodel_ckpt.config.keys.kinds import KTOConfig
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.kto import DESIRABLE, MISMATCHED, KTOCollator
from automodel_ckpt.errors import Problem
from automodel_ckpt.parallel.ranks.agree import sum_over_ranks
from automodel_ckpt.recipes.preference import (
    PreferenceFinetune,
    PreferenceObjective,
    evaluation_pass,
    has_labels,
)
from automodel_ckpt.training.values.records import BatchSize, EvaluationTotals, LossSum

_ROW_TENSORS = ("input_ids", "attention_mask", "labels")


class KTO(PreferenceObjective):
    """The loss of judged completions, summed over the samples."""

    terms = "samples"
    measures = (
        "accuracy",
        "kl",
        "reward_desirable",
        "reward_undesirable",
    )
    section: KTOConfig
    _kl = 0.0
    """The estimate of the KL divergence over the global batch, at least 0."""
    _num_samples = _num_desirable = 0
    """Counts of the global batch."""

    def size_of(self, micro_batch: Tensors) -> BatchSize:
        num_samples = int(has_labels(micro_batch["labels"]).sum())
        return replace(super().size_of(micro_batch), count=num_samples)

    def start_batch(self, micro_batches: Sequence[Tensors]) -> None:
        """Estimate the KL divergence over the global batch of all ranks. A collective.

        It does not depend on how the global batch is divided. The last batch of an epoch can have a single sample, and
        then no other completion: the estimate is 0.
        """
        if not micro_batches:
            return
        gain, num_rows, num_samples, num_desirable = 0.0, 0, 0, 0
        for micro_batch in micro_batches:
            is_sample = has_labels(micro_batch["labels"])
            rows = {name: micro_batch[f"{MISMATCHED}{name}"] for name in _ROW_TENSORS}
            counts = is_sample & has_labels(rows["labels"])
            gain += float(self._gain_now(rows)[self._on_device(counts)].double().sum())
            num_rows += int(counts.sum())
            num_samples += int(is_sample.sum())
            num_desirable += int((is_sample & micro_batch[DESIRABLE]).sum())
        here = (gain, num_rows, num_samples, num_desirable)
        if not self.layout.reports:
            # Another rank has the same rows.
            here = (0.0, 0, 0, 0)
        gain, *counted = sum_over_ranks(self.layout.gloo_group, *here)
        num_rows, self._num_samples, self._num_desirable = (int(count) for count in counted)
        self._kl = max(0.0, gain / num_rows) if num_rows > 1 else 0.0

    def _gain_now(self, rows: Tensors) -> Tensor:
        """The gain [B] of *rows* without gradients and without dropout."""
        rows = self.rows_of(rows)
        with evaluation_pass(self.model):
            log_probs = self.log_probs(rows)
        return log_probs - self.reference_log_probs(rows)

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the loss of the samples in *micro_batch*, summed, after :meth:`start_batch` for its global batch."""
        rows = self.rows_of({name: micro_batch[name] for name in _ROW_TENSORS})
        is_sample = self._on_device(has_labels(micro_batch["labels"]))
        is_desirable = self._on_device(micro_batch[DESIRABLE])
        # The reference first: its pass may leave other parameters gathered than the backward pass needs.
        reference = self.reference_log_probs(rows)
        reward = self.section.beta * (self.log_probs(rows) - reference)
        # Selected before the sigmoid, so that a value of a masked row that is not finite has no gradient either.
        reward = torch.where(is_sample, reward, 0.0)
        above = reward - self.section.beta * self._kl
        utility = torch.sigmoid(torch.where(is_desirable, above, -above))
        weight = torch.where(
            is_desirable, self.section.desirable_weight, self.section.undesirable_weight
        )
        losses = torch.where(is_sample, weight * (1 - utility), 0.0)
        reward = reward.detach()
        is_right = torch.where(is_desirable, above > 0, above < 0)
        right = is_right & is_sample
        desirable = is_desirable & is_sample
        undesirable = ~is_desirable & is_sample
        metrics = {
            "accuracy": right.sum(),
            "kl": self._kl * is_sample.sum(),
            "reward_desirable": torch.where(desirable, reward, 0.0).sum(),
            "reward_undesirable": torch.where(undesirable, reward, 0.0).sum(),
            "desirable": desirable.sum(),
        }
        if self.model.training:
            metrics |= self._means_of_batch(metrics)
        result = self.with_aux_loss(losses.sum())
        return replace(result, metrics={**metrics, **result.metrics})

    def _means_of_batch(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scale the summed rewards, so that their mean over all samples is that over the samples with the judgment."""
        num_undesirable = self._num_samples - self._num_desirable
        counts = {"reward_desirable": self._num_desirable, "reward_undesirable": num_undesirable}
        scaled = {}
        for name, count in counts.items():
            scaled[name] = metrics[name] * (self._num_samples / count if count else math.nan)
        return scaled

    def summarize(self, totals: EvaluationTotals) -> dict[str, float]:
        num_desirable = totals.sums["desirable"][0]
        num_undesirable = totals.count - num_desirable
        return {
            "accuracy": totals.mean("accuracy"),
            "kl": totals.mean("kl"),
            "reward_desirable": _ratio(totals.sums["reward_desirable"][0], num_desirable),
            "reward_undesirable": _ratio(totals.sums["reward_undesirable"][0], num_undesirable),
        }


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


class KTOFinetune(PreferenceFinetune):
    """Trains ``model`` to give desirable completions of ``dataset`` a higher probability, and others a lower one."""

    objective_class = KTO
    with_preceding = True

    section_key, section_class = "kto", KTOConfig

    def config_problems(self) -> list[Problem]:
        problems = super().config_problems()
        size = self.config.step_scheduler.global_batch_size
        if size < 2:
            problems.append(
                Problem(
                    "the KL estimate needs the completion of another sample in the global batch",
                    "step_scheduler.global_batch_size",
                    size,
                    "set at least 2; its estimate is better with 16 or more",
                )
            )
        return problems

    def build_collate_fn(self) -> Any:
        """Build the collator of judged completions; ``dataloader.collate_fn`` makes the tensors of its rows."""
        return KTOCollator(super().build_collate_fn())
