"""Shared code of recipes that train on preferences: log-probabilities of answers, the reference model, and pairs.

The reference is the model that the trained one is compared with: by default the one that training starts from. It is a
second :class:`~automodel_ckpt.training.model.trainable.Trainable`. With adapters, it is the base with the adapters
disabled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.recipe_rules import Unsupported
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.preference import NUMBERS, PreferenceCollator, require_pairs
from automodel_ckpt.errors import Problem
from automodel_ckpt.loss.causal import (
    IGNORE_INDEX,
    WHOLE,
    labelled_positions,
    shift_labels,
)
from automodel_ckpt.models.inspect.interface import logits_of
from automodel_ckpt.models.inspect.repository import check_revision
from automodel_ckpt.models.layers.adapter import without_adapters
from automodel_ckpt.models.loss.loss_head import head_without_adapters
from automodel_ckpt.models.loss.position_losses import position_losses
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.model.sections import naming_keys
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import BatchSize, LossSum

log = logging.getLogger("automodel_ckpt")

OF_ANSWERS = (
    Unsupported("packed_sequence", "each answer needs a separate row"),
    Unsupported("distributed.cp_size", "the loss needs complete rows"),
    Unsupported("loss_fn", "its section describes the loss"),
    Unsupported("model.mtp", "the loss is of complete answers"),
)
"""What recipes with a loss of complete answers do not support."""

_OTHER_REFERENCE = (
    "the reference is the base without the adapters that init_from names, and not the model that training starts from: "
    "to compare with that, merge them (ckpt export --merge) and name the result in %s.reference"
)


@dataclass(frozen=True)
class Reference:
    """The frozen model that the trained one is compared with.

    *adapters* is the trained model if the reference is its base. None: the reference is another model.
    """

    trainable: Trainable
    adapters: nn.Module | None = None

    @contextmanager
    def ready(self) -> Iterator[Trainable]:
        """Yield the reference, in evaluation mode and without gradients, and leave the trained model as it was."""
        if self.adapters is None:
            with torch.no_grad():
                yield self.trainable
            # Without a backward pass, FSDP2 would leave the root's parameters gathered.
            reshard(self.trainable.model)
            return
        head = head_without_adapters(self.adapters, self.trainable.loss_head)
        with evaluation_pass(self.adapters), without_adapters(self.adapters):
            yield replace(self.trainable, loss_head=head)


@contextmanager
def evaluation_pass(model: nn.Module) -> Iterator[None]:
    """Run *model* without gradients and without dropout; on exit, restore its mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class PreferenceObjective(Objective):
    """Computes log-probabilities of answers, of the trained model and of its :attr:`reference`."""

    sums_cross_entropy = False
    reference: Reference

    def log_probs(self, rows: Tensors, trainable: Trainable | None = None) -> Tensor:
        """Compute the log-probability [B] of the labeled tokens of each row, in float32 or float64.

        The trained model computes them, or *trainable* if it is given. A row without labels has log-probability 0.
        """
        return self.log_probs_of(rows, [rows["labels"]], trainable)[0]

    def log_probs_of(
        self, rows: Tensors, labels: Sequence[Tensor], trainable: Trainable | None = None
    ) -> Tensor:
        """Compute :meth:`log_probs` for each of *labels* [B, T] of the same rows in one pass: [len(labels), B]."""
        trainable = trainable or self.trainable
        inputs = self._inputs(rows, None)
        if trainable.loss_head is None:
            output = trainable.forward(inputs)
            self._note(trainable, output, rows)
            logits = logits_of(output)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_probs = []
            for each in labels:
                targets = self._on_device(shift_labels(each))
                losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
                log_probs.append(-losses.sum(dim=1))
            return torch.stack(log_probs)
        found = [labelled_positions(each) for each in labels]
        positions = torch.cat([each for each, _ in found if each is not None])
        targets = torch.cat([each for _, each in found])
        # Not sums over rows: each would keep a gradient of the output layer's weight until the backward pass.
        sizes = [size for each in labels for size in label_counts({"labels": each}).tolist()]
        loss_pass = trainable.loss_head.computing_loss(
            self._on_device(positions), self._on_device(targets), criterion=position_losses
        )
        with loss_pass:
            output = trainable.forward(inputs)
        self._note(trainable, output, rows)
        by_row = torch.split(loss_pass.loss_in(output), sizes)
        return -torch.stack([losses.sum() for losses in by_row]).view(len(labels), -1)

    def _note(self, trainable: Trainable, output: Any, rows: Tensors) -> None:
        """Keep what the router's loss of the trained model needs."""
        if trainable is self.trainable:
            self._note_routing(output, rows, WHOLE)

    def reference_log_probs(self, rows: Tensors) -> Tensor:
        """Compute :meth:`log_probs` of the reference, without gradients."""
        with self.reference.ready() as reference:
            return self.log_probs(rows, reference)


def has_labels(labels: Tensor) -> Tensor:
    """Whether each row of [B, T] has a label that is predicted: a bool tensor [B]."""
    return (labels[:, 1:] != IGNORE_INDEX).any(dim=1)


class AnswerFinetune(LLMFinetune):
    """A recipe with a loss of complete answers."""

    # Each answer has a separate row: the loss needs the probability of each one.
    shares_rows = False
    uses_dropout = False
    unsupported: ClassVar[Sequence[Unsupported]] = OF_ANSWERS


class PreferenceFinetune(AnswerFinetune):
    """Trains a language model in comparison with a frozen reference model. A subclass defines the loss."""

    reference: Reference

    def config_problems(self) -> list[Problem]:
        problems, config = super().config_problems(), self.config
        name, where = self.section.reference, f"{self.config.recipe}.reference"
        if name is not None and isinstance(config.model, Target):
            what = "the reference of a model by _target_ is the model that training starts from"
            problems.append(Problem(what, where, name, "remove the key"))
        if name is None and config.peft is not None and config.peft.bias != "none":
            what = "the reference is the base of the adapters, and this option trains biases of the base"
            hint = f"remove peft.bias, or name the reference model in {where}"
            problems.append(Problem(what, "peft.bias", config.peft.bias, hint))
        return problems

    def build(self) -> None:
        """Create what the fine-tuning of a language model needs, and the reference model."""
        super().build()
        self.reference = self.build_reference()

    def build_reference(self) -> Reference:
        """Build the reference model. With adapters, the reference is their base, unless another one is named."""
        name, config = self.section.reference, self.config
        if name is None and config.peft is not None:
            if config.init_from:
                log.warning(_OTHER_REFERENCE, config.recipe)
            return Reference(self.trainable, self.trainable.model)
        if name is not None:
            section = config.model
            # A model by _target_ has no other name.
            assert isinstance(section, ModelConfig)
            revision = self.section.reference_revision
            key = f"{config.recipe}.reference"
            check_revision(name, revision, f"{key}_revision", key)
            other = replace(section, from_pretrained=name, from_config=None, revision=revision)
            config = replace(config, model=other, peft=None)
            names = {"model": key, "model.from_pretrained": key}
            names["model.revision"] = f"{key}_revision"
            with naming_keys(lambda where: names.get(where, where)):
                return Reference(self.build_trainable(config, is_trained=False))
        reference = Reference(self.build_trainable(is_trained=False))
        self._start_reference(reference)
        return reference

    def other_models(self) -> Sequence[nn.Module]:
        """List the reference model, unless the trained model computes it."""
        model = self.reference.trainable.model
        return () if model is self.model else (model,)

    def _start_reference(self, reference: Reference) -> None:
        """Give *reference* the weights that the trained model gets from ``init_from``."""
        if not self.is_dry_run:
            self.fill_from_weights({"model": reference.trainable.model}, reference.trainable)

    def build_objective(self) -> Objective:
        """Build the objective, with the reference model."""
        objective = super().build_objective()
        assert isinstance(objective, PreferenceObjective)
        objective.reference = self.reference
        return objective


class PairObjective(PreferenceObjective):
    """The loss of pairs of rows, summed over the pairs: row 2 i is preferred to row 2 i + 1."""

    terms = "pairs"
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
        losses: Tensor,
        rewards: Tensor,
        micro_batch: Tensors,
        **further: Tensor,
    ) -> LossSum:
        """Sum the *losses* [P] of the pairs, and what is logged of the *rewards* [2 P] of their rows.

        The logs have the share of pairs with the higher reward for the preferred answer (``accuracy``), the difference
        of both rewards (``margin``), the rewards, and values *further* [P] of pairs. Pairs without labels count as 0.
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


def is_pair(micro_batch: Tensors) -> Tensor:
    """Whether both rows of each pair have labels: a bool tensor [P]."""
    both: Tensor = has_labels(micro_batch["labels"]).view(-1, 2).all(dim=1)
    return both


def label_counts(rows: Tensors) -> Tensor:
    """The number of predicted labels of each row [B]."""
    return (rows["labels"][:, 1:] != IGNORE_INDEX).sum(dim=1)


class PairFinetune(AnswerFinetune):
    """A recipe with pairs as its data. A subclass defines the loss."""

    sample_noun = "pair"
    rows_per_sample = 2

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names. Raises :class:`RecipeError` if its first sample is not a pair."""
        dataset = super().build_dataset(section)
        require_pairs(dataset)
        return dataset

    def build_collate_fn(self) -> Any:
        """Build a collator of pairs; ``dataloader.collate_fn`` makes the tensors of their rows."""
        return PreferenceCollator(super().build_collate_fn())
