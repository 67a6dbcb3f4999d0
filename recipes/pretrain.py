"""Pretraining of a causal language model on documents: packed rows, mixtures, z-loss, learning rates by width.

The model usually comes from ``model.from_config``. ``packed_sequence.size`` is the length of a row, and the section
``pretrain`` determines how rows divide documents. Everything else is the same as in
:class:`~automodel_ckpt.recipes.llm_finetune.LLMFinetune`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from automodel_ckpt.base.units import counted
from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.kinds import PretrainConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.document_lane import DocumentRows, RowRules
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.batches.packed_stream import PackedStream
from automodel_ckpt.data.batches.packing import PackedDataset, check_has_length
from automodel_ckpt.data.mixture import IndexedStream, MixtureStream, for_each_source
from automodel_ckpt.data.samples.samples import RowStream
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.loss.fused_cross_entropy import ZLoss
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.parts.optimizers import trained_parameters

log = logging.getLogger("automodel_ckpt")


def scale_initial_values(model: nn.Module, factor: float) -> None:
    """Scale the initial values of *model*, sharded or not, in place. *factor* is the base width divided by
    the width of the model."""
    num_hidden = num_output = 0
    with torch.no_grad():
        for each in trained_parameters(model):
            if each.is_output and each.scales_with_width:
                each.parameter.mul_(factor)
                num_output += 1
            elif each.scales_with_width:
                each.parameter.mul_(factor**0.5)
                num_hidden += 1
    log.info(
        "initial values by width: %d hidden matrices times %.4g, %d of the output layer times %.4g",
        num_hidden,
        factor**0.5,
        num_output,
        factor,
    )


class Pretrain(LLMFinetune):
    """Trains ``model`` to predict the next token of documents, which share rows of ``packed_sequence.size`` tokens."""

    section_key, section_class = "pretrain", PretrainConfig

    # ---------------------------------------------------------------- data

    def with_limit(self, section: Target) -> Target:
        """Return the section of a data set. Documents that rows divide may be longer than the model's context."""
        return section if self.section.split_documents else super().with_limit(section)

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names; in packed rows, if there is a ``packed_sequence`` section."""
        dataset = build(section, tokenizer=self.tokenizer)
        if self.config.packed_sequence is None:
            return dataset
        rules = RowRules(
            self.config.packed_sequence.size,
            self.section.split_documents,
            self.section.attend_across_documents,
        )

        rows_of = partial(self._rows_of, rules)
        if isinstance(dataset, RowStream):
            return PackedStream({"": dataset}, {"": Fraction(1)}, rules)
        if isinstance(dataset, MixtureStream):
            return _packed_mixture(dataset, rules, rows_of)
        return for_each_source(dataset, rows_of)

    def _rows_of(self, rules: RowRules, samples: Any) -> Any:
        """The rows of a map-style data set of documents."""
        if not rules.splits:
            return PackedDataset(
                samples,
                rules.size,
                attends_across=rules.attends_across,
                hint="set pretrain.split_documents true",
            )
        check_has_length(samples)
        rows = DocumentRows(samples, rules)
        documents, count = counted(len(samples), "document"), counted(len(rows), "row")
        log.info("divided %s into %s of %s", documents, count, counted(rules.size, "token"))
        return rows

    def build_dataloader(self, section: Target, *, validation: bool = False) -> GlobalBatchLoader:
        """Build the loader as every recipe does. Raises :class:`RecipeError` for a packed stream that has to end."""
        loader = super().build_dataloader(section, validation=validation)
        if not isinstance(loader.dataset, PackedStream):
            return loader
        if validation:
            raise RecipeError(
                "a packed stream has no end, so a validation of it would have none",
                where="validation_dataset",
                value="streaming: true with packed_sequence",
            )
        if self.config.step_scheduler.max_steps is None:
            raise RecipeError(
                "a packed stream has no end: it begins again in another order",
                where="step_scheduler.max_steps",
                value="null",
                hint="set step_scheduler.max_steps",
            )
        return loader

    # ---------------------------------------------------------------- model, loss, optimizer

    def build_trainable(
        self, config: RecipeConfig | None = None, *, is_trained: bool = True
    ) -> Trainable:
        """Build the model as every recipe does, with the initial values of its width."""
        config = config or self.config
        factor = self.width_factor()
        if self.section.attend_across_documents:
            # A row is one sequence, so attention is not limited to the tokens of a document.
            config = replace(config, packed_sequence=None)
        trainable = super().build_trainable(config, is_trained=is_trained)
        if factor != 1:
            scale_initial_values(trainable.model, factor)
        return trainable

    def width_factor(self) -> float:
        """The base width divided by the width of the model; 1 without ``pretrain.base_width``."""
        base_width: int | None = self.section.base_width
        if base_width is None:
            return 1.0
        assert self.model_config is not None
        text = self.model_config.get_text_config()
        if getattr(text, "tie_word_embeddings", False):
            raise RecipeError(
                "the output layer is tied to the embedding, and a width scales them differently",
                where="pretrain.base_width",
                value=base_width,
                hint="set tie_word_embeddings: false in model.from_config, or remove base_width",
            )
        return base_width / int(text.hidden_size)

    def build_objective(self) -> Objective:
        """Build what computes the loss, with the z-loss."""
        objective = super().build_objective()
        if self.section.z_loss is not None:
            objective.z_loss = ZLoss(self.section.z_loss, self.layout.device)
        return objective


def _packed_mixture(
    mixture: MixtureStream, rules: RowRules, rows_of: Callable[[Any], Any]
) -> PackedStream:
    if mixture.num_samples is not None:
        raise RecipeError(
            "a packed stream has no end, so its epochs have no length",
            where="dataset.num_samples",
            value=mixture.num_samples,
            hint="remove the key",
        )
    sources = {}
    for name, source in mixture.sources.items():
        if isinstance(source, IndexedStream):
            sources[name] = rows_of(source.dataset)
        elif isinstance(source, RowStream):
            sources[name] = source
        else:
            check_has_length(source)
    return PackedStream(sources, mixture.shares, rules)
