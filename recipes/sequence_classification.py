"""Training a model that gives labels, or numbers, to texts: a pretrained backbone with a classification head.

The model is one of transformers' ``AutoModelForSequenceClassification``: an encoder such as BERT or ModernBERT, or a
decoder such as Llama or Qwen. Its head gets random values if the pretrained files have none, and is trained in full,
also with adapters. Exports have the names of the labels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.kinds import ClassificationConfig
from automodel_ckpt.config.recipe_rules import WITH_HEAD
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.classification import LabelCollator
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.samples.labels import Labels
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.loss.causal import IGNORE_INDEX, in_numpy
from automodel_ckpt.models.inspect.interface import text_inputs
from automodel_ckpt.models.task_head import (
    SEQUENCE_CLASSIFICATION,
    padding_of,
    pretrained_labels,
    set_labels,
    set_padding,
)
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.model.sections import row_multiple
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import BatchSize, EvaluationTotals, LossSum

log = logging.getLogger("automodel_ckpt")

_LONGEST = 10**6
"""Tokenizers without a limit have a larger model_max_length."""


class SampleObjective(Objective):
    """A loss that is a sum over samples, each of which has one label instead of one per token."""

    terms = "samples"

    def size_of(self, micro_batch: Tensors) -> BatchSize:
        """Count the samples of *micro_batch* with a label, and its tokens."""
        has_label = in_numpy(micro_batch["labels"]) != IGNORE_INDEX
        num_samples = int(has_label.sum())
        num_tokens = 0
        if num_samples:
            num_tokens = int(in_numpy(micro_batch["attention_mask"]).sum())
        return BatchSize(num_samples, 0, num_tokens)

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the summed loss of the samples with a label, and what is measured of them."""
        self.check_length(micro_batch["input_ids"].shape[1])
        rows = text_inputs(self.model, micro_batch)
        logits = self.logits(rows).float()
        has_label = self._on_device(micro_batch["labels"]) != IGNORE_INDEX
        targets = self._on_device(micro_batch["targets"])
        losses = self.sample_losses(logits, targets)
        # A product with zero would keep a NaN.
        loss = losses.where(has_label, 0.0).sum()
        kept, wanted = logits.detach()[has_label], targets[has_label]
        return LossSum(loss, self.measured(kept, wanted))

    def sample_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss [B] of each sample from *logits* [B, L] and *targets* [B, numbers]."""
        raise NotImplementedError

    def measured(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute what the measures are made of, summed over samples; more of it in evaluation passes."""
        raise NotImplementedError


class SingleLabel(SampleObjective):
    """The cross-entropy of the label of each text."""

    measures = ("accuracy", "f1")

    def sample_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy [B] of *logits* [B, L]. *targets* [B, 1] are indices of labels."""
        return F.cross_entropy(logits, targets[:, 0].long(), reduction="none")

    def measured(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Count the correct predictions, and in evaluation passes the predictions of each label."""
        num_labels = logits.shape[1]
        predicted = F.one_hot(logits.argmax(dim=1), num_labels)
        wanted = F.one_hot(targets[:, 0].long(), num_labels)
        num_correct = (predicted * wanted).sum()
        return {"accuracy": num_correct, **_counts(self, predicted, wanted)}

    def summarize(self, totals: EvaluationTotals) -> dict[str, float]:
        """Compute the accuracy, and the mean F1 score of the labels that occur in the data or in predictions."""
        scores = f1_scores(totals.sums)
        found = [score for score in scores if score is not None]
        f1 = sum(found) / len(found) if found else math.nan
        return {"accuracy": totals.mean("accuracy"), "f1": f1}


class MultiLabel(SampleObjective):
    """The mean over all labels of their binary cross-entropies."""

    measures = ("accuracy", "f1_micro", "f1_macro")

    def sample_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss [B] of *logits* [B, L]. *targets* [B, L] are 1 for the labels of a text."""
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.mean(dim=1)

    def measured(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Count the texts with all labels correct, and in evaluation passes the predictions of each label."""
        # A probability above one half.
        predicted = (logits > 0).long()
        wanted = targets.long()
        is_exact = (predicted == wanted).all(dim=1)
        return {"accuracy": is_exact.sum(), **_counts(self, predicted, wanted)}

    def summarize(self, totals: EvaluationTotals) -> dict[str, float]:
        """Compute the share of texts with all labels correct, and F1 scores. The score of a label without any is 0."""
        f1_micro = f1_macro = math.nan
        if totals.count > 0:
            (of_all_labels,) = f1_scores({key: [sum(each)] for key, each in totals.sums.items()})
            scores = [score or 0.0 for score in f1_scores(totals.sums)]
            f1_micro = of_all_labels or 0.0
            f1_macro = sum(scores) / len(scores)
        return {"accuracy": totals.mean("accuracy"), "f1_micro": f1_micro, "f1_macro": f1_macro}


class Regression(SampleObjective):
    """The squared error, averaged over the numbers that are predicted."""

    measures = ("mse", "pearson")

    def sample_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean squared error [B] of *logits* [B, L] and *targets* [B, L]."""
        return (logits - targets).square().mean(dim=1)

    def measured(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Sum the squared errors, and in evaluation passes what a correlation needs."""
        squared_error = self.sample_losses(logits, targets).sum()
        if self.evaluation is None:
            return {"mse": squared_error}
        x, y = logits.double(), targets.double()
        products = {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
        sums = {name: value.sum(dim=0) for name, value in products.items()}
        return {"mse": squared_error, **sums}

    def summarize(self, totals: EvaluationTotals) -> dict[str, float]:
        """Compute the mean squared error, and the correlation with the labels (the mean over several numbers)."""
        return {"mse": totals.mean("mse"), "pearson": pearson(totals.count, totals.sums)}


def _counts(objective: Objective, predicted: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Count by label [L] in evaluation passes: where it is predicted, where it is in the data, and where it is both.

    *predicted* and *wanted* [B, L] are 1 where a text has the label. Empty in training.
    """
    if objective.evaluation is None:
        return {}
    return {
        "num_correct": (predicted * wanted).sum(dim=0),
        "num_predicted": predicted.sum(dim=0),
        "num_labeled": wanted.sum(dim=0),
    }


OBJECTIVES: Mapping[str, type[SampleObjective]] = {
    "single_label": SingleLabel,
    "multi_label": MultiLabel,
    "regression": Regression,
}


class SequenceClassification(LLMFinetune):
    """Trains ``model`` to predict the labels of the texts of ``dataset``."""

    auto_class = AutoModelForSequenceClassification
    task_type = SEQUENCE_CLASSIFICATION
    shares_rows = False
    unsupported = WITH_HEAD

    labels: Labels
    """The labels. As state, they are part of checkpoints, and a resume with others is an error."""

    def __init__(self, config: RecipeConfig, *, config_yaml: str) -> None:
        super().__init__(config, config_yaml=config_yaml)
        self.objective_class = OBJECTIVES[self.section.problem]

    section_key, section_class = "classification", ClassificationConfig

    def build_model_config(self) -> PreTrainedConfig | None:
        """Read the configuration of the model, and give it the labels and the padding token."""
        config = super().build_model_config()
        assert config is not None  # a model by _target_ is not supported
        names = self._label_names(config)
        self.labels = Labels(tuple(names), self.section.problem)
        set_labels(config, names, self.section.problem)
        set_padding(config, padding_of(config, self.tokenizer))
        return config

    def _label_names(self, config: PreTrainedConfig) -> Sequence[str]:
        """The names of the section, or else the names of the pretrained classifier."""
        section = self.section
        pretrained = pretrained_labels(config)
        count = section.num_labels or (1 if section.problem == "regression" else None)
        if section.labels:
            names: Sequence[str] = section.labels
        elif count is not None:
            names = [f"LABEL_{index}" for index in range(count)]
        elif pretrained:
            names = pretrained
        else:
            raise RecipeError(
                "the labels are not known",
                where="classification.labels",
                value="none, and the pretrained model has no classification head",
                hint="list the names of the labels, in the order of the model's outputs",
            )
        if section.labels and len(pretrained) == len(names) and list(names) != list(pretrained):
            log.warning(
                "the head of the pretrained classifier is trained further with other labels: %s; it had %s",
                ", ".join(names),
                ", ".join(pretrained),
            )
        return names

    def build_dataloader(self, section: Target, *, validation: bool = False) -> GlobalBatchLoader:
        """Build a loader; ``seq_length`` null is the limit of the tokenizer, or else of the model's context."""
        limit = getattr(self.tokenizer, "model_max_length", _LONGEST)
        assert self.model_config is not None
        context = getattr(self.model_config.get_text_config(), "max_position_embeddings", _LONGEST)
        # RoBERTa's context is two tokens shorter than max_position_embeddings; its tokenizer has the right limit.
        if section.kwargs.get("seq_length", 0) is None and limit < min(context, _LONGEST):
            section = replace(section, kwargs=section.kwargs | {"seq_length": limit})
        return super().build_dataloader(section, validation=validation)

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names. Its builder gets the tokenizer and the labels."""
        return build(section, tokenizer=self.tokenizer, labels=self.labels)

    def usual_collate_fn(self) -> Any:
        """Build a collator for texts with labels."""
        assert self.model_config is not None
        pad_token_id: Any = self.model_config.get_text_config().pad_token_id
        return LabelCollator(pad_token_id, self.labels, row_multiple(self.config, self.layout))

    def labels_in_words(self, micro_batch: Tensors) -> list[str]:
        """Describe the label of each sample of *micro_batch*, for ``--show-samples``."""
        return [self.labels.describe(row) for row in micro_batch["targets"].tolist()]


Sums = Mapping[str, Sequence[float]]


def f1_scores(sums: Sums) -> list[float | None]:
    """Compute the F1 score of each label: the harmonic mean of precision and recall.

    *sums* has ``num_correct``, ``num_predicted`` and ``num_labeled`` by label. A label that is neither predicted nor in
    the data has no score (None).
    """
    scores: list[float | None] = []
    counts = zip(
        sums.get("num_correct", ()),
        sums.get("num_predicted", ()),
        sums.get("num_labeled", ()),
        strict=True,
    )
    for correct, predicted, labeled in counts:
        total = predicted + labeled
        scores.append(2 * correct / total if total else None)
    return scores


def pearson(count: float, sums: Sums) -> float:
    """Compute Pearson's correlation of x and y, averaged over their columns; NaN if one of them does not vary.

    *sums* has by column the sums of x, y and their products over *count* samples: ``x``, ``y``, ``xx``, ``yy``, ``xy``.
    """
    if not count or "x" not in sums:
        return math.nan
    values = []
    names = ("x", "y", "xx", "yy", "xy")
    for x, y, xx, yy, xy in zip(*(sums[name] for name in names), strict=True):
        # The variances and the covariance, all times count.
        variance_x = xx - x * x / count
        variance_y = yy - y * y / count
        covariance = xy - x * y / count
        spread = variance_x * variance_y
        values.append(covariance / math.sqrt(spread) if spread > 0 else math.nan)
    return sum(values) / len(values)
