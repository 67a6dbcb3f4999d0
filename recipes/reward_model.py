"""Training a reward model: a pretrained backbone with a head that computes one score of a text.

The difference of the scores of two answers is the logarithm of the odds that the first one is preferred
(Bradley-Terry, arXiv:2203.02155). The model is one of transformers' ``AutoModelForSequenceClassification`` with one
label. Its head gets random values if the pretrained files have none, and is trained in full, also with adapters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from automodel_ckpt.config.keys.kinds import RewardModelConfig
from automodel_ckpt.config.recipe_rules import NEEDS_HEAD, NO_GENERATION
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.preference import MARGIN
from automodel_ckpt.models.task_head import SEQUENCE_CLASSIFICATION, set_one_score
from automodel_ckpt.recipes.preference import OF_ANSWERS, PairFinetune, PairObjective
from automodel_ckpt.training.values.records import LossSum


class BradleyTerry(PairObjective):
    """The negative logarithm of the probability that the preferred answers are preferred, summed over the pairs."""

    section: RewardModelConfig

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the loss of the pairs in *micro_batch*, summed.

        A pair's ``margin`` is subtracted from the difference of its scores (arXiv:2307.09288). NaN means none.
        """
        rows = self.pair_rows(micro_batch)
        scores = self.logits(rows).squeeze(-1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        chosen, rejected = scores.view(-1, 2).unbind(1)
        difference = chosen - rejected
        if MARGIN in micro_batch:
            difference = difference - self._on_device(micro_batch[MARGIN]).nan_to_num(nan=0.0)
        losses = -F.logsigmoid(difference)
        if self.section.center_coefficient:
            losses = losses + self.section.center_coefficient * (chosen + rejected).square()
        return self.summed(losses, scores, micro_batch)


class RewardModel(PairFinetune):
    """Trains ``model`` to give preferred answers of ``dataset`` a higher score than rejected ones."""

    auto_class = AutoModelForSequenceClassification
    task_type = SEQUENCE_CLASSIFICATION
    unsupported = (*OF_ANSWERS, NEEDS_HEAD, NO_GENERATION)
    objective_class = BradleyTerry

    section_key, section_class = "reward_model", RewardModelConfig

    def build_model_config(self) -> PreTrainedConfig | None:
        """Read the configuration of the model, and give it one label and the padding token."""
        config = super().build_model_config()
        assert config is not None  # a model by _target_ is not supported
        set_one_score(config, self.tokenizer)
        return config
