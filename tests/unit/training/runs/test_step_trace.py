"""The memory of a step traced without values, against the bytes of the tensors of a real step."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel

from automodel_ckpt.models.attention.position_bias import lay_out_position_biases
from automodel_ckpt.models.layers.activation_memory import checkpoint_activations
from automodel_ckpt.training.forecast.step_trace import (
    HeadMemory,
    LiveBytes,
    StepTrace,
    traced_step,
)

INPUTS = {"input_ids": torch.arange(2 * 96).reshape(2, 96) % 100}
NO_HEAD = HeadMemory(0)
OPTIONS = {"use_cache": False}


def model_on(device: str, kind: str) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
    )
    with torch.device(device):
        model: Any = AutoModel.from_config(config, attn_implementation="sdpa")
        if kind == "adapters":
            lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
            model = peft.get_peft_model(model, lora).get_base_model()
    if kind in ("full", "selective"):
        checkpoint_activations(model, kind, model.layers)
    return model.train()


def counted(model: nn.Module, num_micro_batches: int, *, autocast: bool = False) -> int:
    """The peak of the bytes of all tensors that a real step creates."""
    live = LiveBytes()
    for parameter in (*model.parameters(), *model.buffers()):
        live.exclude(parameter)
    # Probes call a model before it is trained.
    with torch.no_grad():
        model(**INPUTS, **OPTIONS)
    with live:
        for _ in range(num_micro_batches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                hidden = model(**INPUTS, **OPTIONS)[0]
            gradient = torch.empty_like(hidden)
            torch.autograd.backward([hidden], [gradient])
            del hidden, gradient
    return live.peak


def traced(kind: str, **options: Any) -> StepTrace:
    return traced_step(model_on("meta", kind), INPUTS, OPTIONS, **options)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("kind", ["plain", "full", "selective", "adapters"])
def test_the_traced_peak_is_that_of_the_tensors_of_a_real_step(kind: str) -> None:
    trace = traced(kind)
    assert counted(model_on("cpu", kind), 1) == pytest.approx(trace.peak(NO_HEAD), rel=0.01)
    both = max(trace.peak(NO_HEAD), trace.later_peak(NO_HEAD) + trace.gradients)
    assert counted(model_on("cpu", kind), 2) == pytest.approx(both, rel=0.01)


def test_the_weights_of_attention_with_a_trained_bias_are_traced() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=100, decoder_start_token_id=0)
    ids = INPUTS["input_ids"] % 100
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :64]}
    with torch.device("meta"):
        trace = traced_step(AutoModel.from_config(config), inputs, OPTIONS)
    live = LiveBytes()
    model = AutoModel.from_config(config).train()
    for parameter in model.parameters():
        live.exclude(parameter)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    with live:
        output = model(**inputs, attention_mask=mask, **OPTIONS)
    assert live.current == pytest.approx(trace.after_forward, rel=0.03)
    assert output[0].requires_grad


def test_position_biases_without_gaps_are_traced_without_the_weights_of_attention() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=100, decoder_start_token_id=0)
    ids = INPUTS["input_ids"] % 100
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :64]}
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    before = traced_step(model, inputs, OPTIONS, is_on_gpu=True)
    assert lay_out_position_biases(model) == 2
    after = traced_step(model, inputs, OPTIONS, is_on_gpu=True)
    scores = 2 * 4 * (96 * 96 + 64 * 64) * 4
    # Of the encoder and the decoder, two layers kept at least the scores and the weights of all pairs of positions.
    assert before.after_forward - after.after_forward > 3 * scores
