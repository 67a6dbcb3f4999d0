"""The operations of encoder-decoders: what torch counts while it computes; padding; models that are not counted."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from automodel_ckpt.models.measure.flop_count import FlopCount, count_flops
from automodel_ckpt.parallel.model_layers import decoder_layers

ROWS, SOURCE, TARGET = 2, 9, 5
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
T5 = {
    **TOKENS,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
BART = {
    **TOKENS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
PART = {
    "model_type": "t5_gemma_module",
    "vocab_size": 64,
    "hidden_size": 16,
    "head_dim": 6,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 8,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5", **T5},
    "gated": {"model_type": "t5", **T5, **GATED},
    "bart": {"model_type": "bart", **BART},
    # A model that does not name the classes of its layers.
    "marian": {"model_type": "marian", **BART},
    "t5gemma": {"model_type": "t5gemma", "encoder": PART, "decoder": PART},
}
# Per token of a first layer: the gradients of the inputs of its queries, keys and values, and of their adapters.
OF_FIRST_LAYER = {"t5": 3 * 16 * 12, "bart": 3 * 16 * 16, "t5gemma": 2 * 16 * 12}
RANK = 2


def built(settings: dict[str, Any]) -> nn.Module:
    config = AutoConfig.for_model(**settings)
    return AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")


def counted(model: nn.Module) -> FlopCount:
    found = count_flops(model, decoder_layers(model))
    assert found is not None
    return found


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(ROWS * SOURCE).reshape(ROWS, SOURCE) + 3
    return {"input_ids": tokens, "labels": tokens[:, :TARGET].clone()}


def computed(model: nn.Module) -> int:
    """What torch counts in both passes over all logits, without the angles of the positions."""
    inputs = batch()
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=inputs["input_ids"], decoder_input_ids=inputs["labels"])
        output.logits.sum().backward()
    angles = 0
    for name, counts in counter.get_flop_counts().items():
        if name.endswith("rotary_emb"):
            angles += sum(counts.values())
    return counter.get_total_flops() - angles


@pytest.mark.parametrize("name", MODELS)
def test_full_training_counts_what_torch_counts(name: str) -> None:
    model = built(MODELS[name])
    assert counted(model).of(batch(), ROWS * TARGET) == computed(model)


@pytest.mark.parametrize("name", OF_FIRST_LAYER)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_first_layers_of_both_parts_count_as_a_whole_with_adapters(name: str) -> None:
    adapters = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="SEQ_2_SEQ_LM")
    model = peft.get_peft_model(built(MODELS[name]), adapters)
    not_computed = 2 * (OF_FIRST_LAYER[name] + 3 * 16 * RANK) * ROWS * (SOURCE + TARGET)
    assert counted(model).of(batch(), ROWS * TARGET) - computed(model) == not_computed


def test_a_frozen_encoder_has_no_backward_pass() -> None:
    model: Any = built(MODELS["bart"])
    whole = counted(model).of(batch(), ROWS * TARGET)
    model.get_encoder().requires_grad_(False)
    model.get_decoder().embed_tokens.requires_grad_(False)
    found = counted(model).of(batch(), ROWS * TARGET)
    # Two of three passes of each encoder layer, and of the keys and values of cross attention the gradient of inputs.
    per_layer = 2 * 16 * 16 + 2 * 16 * 16 + 2 * 16 * 32
    less = 2 * (2 * 2 * per_layer + 3 * 2 * 16 * 16) * ROWS * SOURCE
    less += 2 * (2 * 4 * 16) * ROWS * SOURCE**2
    # The output layer has the weight of the embedding.
    less += 2 * 16 * 64 * ROWS * TARGET
    assert whole - found == less


def test_padding_counts_nothing() -> None:
    found = counted(built(MODELS["t5"]))
    rows = batch()
    rows["attention_mask"] = torch.ones(ROWS, SOURCE, dtype=torch.long)
    assert found.of(rows, ROWS * TARGET) == found.of(batch(), ROWS * TARGET)
    rows["attention_mask"][1, 4:] = 0
    rows["labels"][1, 2:] = -100
    shorter = [
        {"input_ids": rows["input_ids"][:1], "labels": rows["labels"][:1]},
        {"input_ids": rows["input_ids"][1:, :4], "labels": rows["labels"][1:, :2]},
    ]
    expected = sum(found.of(each, each["labels"].numel()) for each in shorter)
    assert found.of(rows, ROWS * TARGET - 3) == expected


def test_attention_to_a_part_of_the_source_is_not_counted() -> None:
    model = built({"model_type": "longt5", **T5})
    assert count_flops(model, decoder_layers(model)) is None
