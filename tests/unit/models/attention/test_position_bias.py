"""Position biases whose rows have no gaps: the same values and gradients."""

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel

from automodel_ckpt.models.attention.positions import lay_out_position_biases

SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
IDS = torch.arange(2 * 24).reshape(2, 24) % 100


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(**SIZES, decoder_start_token_id=0, dropout_rate=0.0)
    return AutoModel.from_config(config).train()


def output_and_gradients(model: Any) -> list[torch.Tensor]:
    mask = torch.ones_like(IDS)
    mask[0, -5:] = 0
    output = model(input_ids=IDS, attention_mask=mask, decoder_input_ids=IDS[:, :16])[0]
    output.square().sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters())]


def test_values_and_gradients_are_the_same_and_rows_have_no_gaps(model: Any) -> None:
    other = copy.deepcopy(model)
    attention = other.encoder.block[0].layer[0].SelfAttention
    assert attention.compute_bias(24, 24).stride(-1) != 1
    # One layer of the encoder and one of the decoder computes the bias of all layers.
    assert lay_out_position_biases(other) == 2
    assert attention.compute_bias(24, 24).stride(-1) == 1
    for before, after in zip(output_and_gradients(model), output_and_gradients(other), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
