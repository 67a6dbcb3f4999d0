"""A recipe that trains a model with a classification head, on texts of the Python documentation."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from automodel_ckpt.models.inspect.interface import logits_of
from automodel_ckpt.models.task_head import SEQUENCE_CLASSIFICATION, set_labels, set_padding
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import BatchSize, LossSum

LABELS = ("low", "middle", "high")


class SecondToken(Objective):
    """The cross-entropy of a label that depends on the second token of a row."""

    def size_of(self, micro_batch: Any) -> BatchSize:
        num_rows = int((micro_batch["labels"] != -100).any(dim=1).sum())
        return replace(super().size_of(micro_batch), count=num_rows)

    def loss(self, micro_batch: Any) -> LossSum:
        logits = logits_of(self.trainable.forward(self._inputs(micro_batch, None)))
        targets = micro_batch["input_ids"][:, 1] % len(LABELS)
        targets = targets.where((micro_batch["labels"] != -100).any(dim=1), -100)
        return LossSum(F.cross_entropy(logits.float(), targets, reduction="sum"))


class Heads(LLMFinetune):
    auto_class: ClassVar[Any] = AutoModelForSequenceClassification
    task_type: ClassVar[str | None] = SEQUENCE_CLASSIFICATION
    shares_rows: ClassVar[bool] = False
    objective_class = SecondToken

    def build_model_config(self) -> PreTrainedConfig | None:
        config = super().build_model_config()
        assert config is not None
        set_labels(config, LABELS, "single_label")
        set_padding(config, self.tokenizer.pad_token_id)
        return config


def outputs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [B, labels] of *tokens* [B, T], without gradients."""
    model.eval()
    with torch.no_grad():
        return logits_of(model(input_ids=tokens))
