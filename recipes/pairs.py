"""Shared code of recipes that train on pairs of a preferred and a rejected answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.preference import NUMBERS, PreferenceCollator, require_pairs
from automodel_ckpt.loss.causal import IGNORE_INDEX
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.preference import OF_ANSWERS, PreferenceObjective, has_labels
from automodel_ckpt.train.build.objective import Tensors
from automodel_ckpt.train.unsupported import Unsupported
from automodel_ckpt.train.values.records import BatchSize, LossSum


class PairObjective(PreferenceObjective):
    """The loss of pairs of rows, summed over the pairs: row 2 i is preferred to row 2 i + 1."""

    terms: ClassVar[str] = "pairs"
    measures: ClassVar[tuple[str, ...] | None] = (
        "accuracy",
        "margin",
        "reward_chosen",
        "reward_rejected",
    )

    def size_of(self, micro_batch: Tensors) -> BatchSize:
        num_pairs = int(is_pair(micro_batch).sum())
        return replace(super().size_of(micro_batch), count=num_pairs)

    def pair_rows(self, micro_batch: Tensors) -> Tensors:
        """The rows of *micro_batch* as the model sees them, without the numbers of the pairs."""
        rows = {name: value for name, value in micro_batch.items() if name not in NUMBERS}
        return self.rows_of(rows)

    def summed(
        self,
        losses: torch.Tensor,
        rewards: torch.Tensor,
        micro_batch: Tensors,
        **further: torch.Tensor,
    ) -> LossSum:
        """Sum the *losses* [P] of the pairs, and what is logged of the *rewards* [2 P] of their rows.

        The logs have the share of pairs whose preferred answer has the higher reward (``accuracy``), the difference of
        both rewards (``margin``), the rewards, and values *further* [P] of pairs. Pairs without labels count as 0.
        """
        counts = self._on_device(is_pair(micro_batch))
        chosen, rejected = rewards.detach().float().view(-1, 2).unbind(1)
        values = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            **further,
        }
        sums = {name: torch.where(counts, value, 0.0).sum() for name, value in values.items()}
        result = self.with_aux_loss(torch.where(counts, losses, 0.0).sum())
        return replace(result, metrics={**sums, **result.metrics})


def is_pair(micro_batch: Tensors) -> torch.Tensor:
    """Whether both rows of each pair have labels: a bool tensor [P]."""
    both: torch.Tensor = has_labels(micro_batch["labels"]).view(-1, 2).all(dim=1)
    return both


def label_counts(rows: Tensors) -> torch.Tensor:
    """The number of predicted labels of each row [B]."""
    return (rows["labels"][:, 1:] != IGNORE_INDEX).sum(dim=1)


class PairFinetune(LLMFinetune):
    """A recipe whose data are pairs. A subclass defines the loss."""

    sample_noun: ClassVar[str] = "pair"
    rows_per_sample: ClassVar[int] = 2
    # Each answer has a separate row: the loss needs the probability of each one.
    shares_rows: ClassVar[bool] = False
    uses_dropout: ClassVar[bool] = False
    unsupported: ClassVar[Sequence[Unsupported]] = OF_ANSWERS

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names. Raises :class:`RecipeError` if its first sample is not a pair."""
        dataset = super().build_dataset(section)
        require_pairs(dataset)
        return dataset

    def build_collate_fn(self) -> Any:
        """Build a collator of pairs; ``dataloader.collate_fn`` makes the tensors of their rows."""
        return PreferenceCollator(super().build_collate_fn())
