"""Direct preference optimization (DPO, arXiv:2305.18290): pairs of answers, compared with a frozen reference model.

The gain of an answer is its log-probability minus its log-probability under the reference. The loss of a pair falls
with the gain of the preferred answer minus the gain of the rejected one. beta times the gain is the reward that the
logs show.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.failures import raise_on_all_ranks
from automodel_ckpt.config.keys.kinds import DPOConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.mixture import for_each_source
from automodel_ckpt.data.preference import CHOSEN, REJECTED, SCORES, ScoredPairs
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.recipes.preference import (
    PairFinetune,
    PairObjective,
    PreferenceFinetune,
    Reference,
    label_counts,
)
from automodel_ckpt.training.values.records import LossSum

log = logging.getLogger("automodel_ckpt")


class DPO(PairObjective):
    """The loss of pairs in comparison with the reference. To change it, override :meth:`pair_losses`."""

    section: DPOConfig

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the loss of the pairs in *micro_batch*, summed."""
        rows = self.pair_rows(micro_batch)
        # The reference first: with adapters, both passes use the same parameters.
        if SCORES[0] in micro_batch:
            # Computed before training.
            scores = torch.stack([micro_batch[name] for name in SCORES], dim=1)
            reference = self._on_device(scores.flatten())
        else:
            reference = self.reference_log_probs(rows)
        log_probs = self.log_probs(rows)
        gains = log_probs - reference
        num_labels = self._on_device(label_counts(rows)).clamp(min=1)
        losses = self.pair_losses(log_probs, gains, num_labels)
        return self.summed(losses, self.section.beta * gains, micro_batch)

    def pair_losses(self, log_probs: Tensor, gains: Tensor, num_labels: Tensor) -> Tensor:
        """Compute the loss [P] of each pair. The arguments [2 P] have a value for each row: the log-probability of its
        labels, its gain over the reference, and the number of its labels, at least 1.
        """
        section = self.section
        if section.loss == "ipo":
            # IPO uses mean gains per token, as its authors compute it: sums would depend on the lengths.
            gains = gains / num_labels
            return (_difference(gains) - 1 / (2 * section.beta)) ** 2
        margins = section.beta * _difference(gains)
        if section.loss == "hinge":
            return F.relu(1 - margins)
        smoothing = section.label_smoothing
        right, wrong = -F.logsigmoid(margins), -F.logsigmoid(-margins)
        if section.loss == "robust":
            return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
        return (1 - smoothing) * right + smoothing * wrong


def _difference(values: Tensor) -> Tensor:
    """The values [2 P] of preferred rows minus the values of rejected rows: [P]."""
    return values[::2] - values[1::2]


class DPOFinetune(PairFinetune, PreferenceFinetune):
    """Trains ``model`` to give preferred answers of ``dataset`` a higher probability, compared with rejected ones."""

    objective_class = DPO

    section_key, section_class = "dpo", DPOConfig

    def build(self) -> None:
        """Create the data, the model, the reference, and what updates the model."""
        self._scored: list[ScoredPairs] = []
        super().build()
        if self._scored:
            score_all(self, self._scored)
            # Frees the memory of another model.
            self.reference = self._start_as_reference()

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names. With ``dpo.precompute``, its pairs have the reference's scores."""
        dataset = super().build_dataset(section)
        if not self.section.precompute or self.is_dry_run:
            return dataset

        def with_scores(source: Any) -> ScoredPairs:
            self._scored.append(ScoredPairs(source))
            return self._scored[-1]

        return for_each_source(dataset, with_scores)

    def build_reference(self) -> Reference:
        """Build the reference model. To compute its scores before training, the untrained model itself is enough."""
        if not self.section.precompute or self.section.reference is not None:
            return super().build_reference()
        reference = self._start_as_reference()
        # A new run gets these weights after build(), and a resumed run the weights of its checkpoint.
        self._start_reference(reference)
        return reference

    def _start_as_reference(self) -> Reference:
        return Reference(self.trainable, self.trainable.model)


_HINT = "set dpo.precompute: false"


def score_all(recipe: Any, datasets: Sequence[ScoredPairs]) -> None:
    """Give each of *datasets* its scores under the reference of *recipe*. A collective.

    Each data parallel rank computes the scores of its part.
    """
    layout, batch_size = recipe.layout, recipe.config.step_scheduler.local_batch_size
    objective = recipe.build_objective()
    doing = "computing the reference's log-probabilities"
    for dataset in datasets:
        loader = GlobalBatchLoader(
            dataset.dataset,
            global_batch_size=batch_size * layout.dp_size,
            local_batch_size=batch_size,
            collate_fn=recipe.build_collate_fn(),
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            shuffle=False,
        )
        # The largest value of all ranks: below any that a rank computes.
        scores = torch.full((len(dataset), 2), -torch.inf)
        batches = iter(loader)
        while True:
            # The forward passes below may be collective, so all ranks have to begin them, or none.
            with raise_on_all_ranks(layout.gloo_group, doing, "dpo.precompute", RecipeError, _HINT):
                batch = next(batches, None)
            if batch is None:
                break
            for micro_batch, numbers in zip(
                batch.micro_batches, loader.sizes.rank_part(batch.sample_ids), strict=True
            ):
                log_probs = objective.reference_log_probs(objective.pair_rows(micro_batch))
                if numbers:
                    # A rank without samples reads one, only to keep in step.
                    scores[numbers] = log_probs.float().cpu().view(-1, 2)
        if layout.world_size > 1:
            dist.all_reduce(scores, dist.ReduceOp.MAX, group=layout.gloo_group)
        dataset.scores = scores.numpy()
        infinite = np.flatnonzero(~np.isfinite(dataset.scores).all(axis=1))
        if len(infinite):
            # The loss of a pair is 0, not infinite, if the chosen answer has -inf.
            first = int(infinite[0])
            raise RecipeError(
                "a log-probability of the reference is not finite",
                where=f"pair {first} of the data set",
                value=dict(zip((CHOSEN, REJECTED), dataset.scores[first].tolist(), strict=True)),
                hint="use another reference, another distributed.mixed_precision, or remove the pair",
            )
        num_pairs = counted(len(dataset), "pair")
        log.info("computed the reference's log-probabilities of %s", num_pairs)
