"""The embedding of a model, and models that have none with one row per token."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    CanineConfig,
    PerceiverConfig,
    PreTrainedConfig,
)

from automodel_ckpt.models.inspect.vocabulary import num_embeddings, vocabulary_names

CANINE = CanineConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
PERCEIVER = PerceiverConfig(d_model=16, d_latents=16, num_latents=4, num_blocks=1)


@pytest.mark.parametrize("config", [CANINE, PERCEIVER], ids=["canine", "perceiver"])
def test_a_model_without_a_layer_of_token_embeddings_has_no_vocabulary(
    config: PreTrainedConfig,
) -> None:
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    assert num_embeddings(model) is None
    assert vocabulary_names(model) == []
