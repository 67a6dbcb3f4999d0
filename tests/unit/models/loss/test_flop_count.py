"""The operations of a model: against a hand count, and against what torch counts while it computes."""

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from automodel_ckpt.models.measure.flop_count import FlopCount, count_flops, document_lengths
from automodel_ckpt.models.model_checks import freeze
from automodel_ckpt.parallel.model_layers import decoder_layers
from tests.support.models.experts import SIZES
from tests.support.models.sizes import model_sizes
from tests.support.models.vision import FAMILIES

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, LENGTH = 32, 48, 3, 64, 12


def llama(**changes: Any) -> nn.Module:
    sizes = model_sizes(
        hidden=HIDDEN, inner=INTERMEDIATE, layers=LAYERS, heads=4, kv_heads=2, vocab=VOCABULARY
    )
    config = transformers.LlamaConfig(**(sizes | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def counted(model: nn.Module) -> FlopCount:
    found = count_flops(model, decoder_layers(model))
    assert found is not None
    return found


def batch(rows: int = 2, length: int = LENGTH) -> dict[str, torch.Tensor]:
    tokens = torch.arange(rows * length).reshape(rows, length) % 50
    return {"input_ids": tokens, "labels": tokens.clone()}


def computed(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """What torch counts in a forward and backward pass over all logits, without the angles of the positions.

    transformers 5.17 computes those as a product of matrices.
    """
    with FlopCounterMode(display=False) as counter:
        output = model(**{name: value for name, value in inputs.items() if name != "labels"})
        output.logits.float().sum().backward()
    angles = 0
    for name, counts in counter.get_flop_counts().items():
        if name.endswith("rotary_emb"):
            angles += sum(counts.values())
    return counter.get_total_flops() - angles


def test_full_training_of_a_llama_counts_six_operations_per_weight_and_token() -> None:
    attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2
    products = LAYERS * (attention + 3 * HIDDEN * INTERMEDIATE)
    found = counted(llama())
    tokens = 2 * LENGTH
    by_hand = 6 * products * tokens + 6 * HIDDEN * VOCABULARY * tokens
    by_hand += 12 * HIDDEN * LAYERS * 2 * LENGTH**2
    assert found.of(batch(), tokens) == by_hand
    assert computed(llama(), batch()) == by_hand, "torch counts the same"
    assert counted(llama(tie_word_embeddings=True)) == found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_frozen_weights_under_adapters_count_four_operations_and_the_adapters_six() -> None:
    rank = 2
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=rank, target_modules=["q_proj", "down_proj"])
    )
    found = counted(model)
    tokens = 2 * LENGTH
    # The input of the first layer has no gradient, and neither have its keys and values: a layer counts as a whole.
    queries_keys_values = 2 * HIDDEN * HIDDEN + rank * HIDDEN
    gradients_of_keys_and_values = 2 * 2 * HIDDEN * 2 * LENGTH**2
    not_computed = 2 * queries_keys_values * tokens + gradients_of_keys_and_values
    assert found.of(batch(), tokens) - computed(model, batch()) == not_computed


def mixture(**changes: Any) -> nn.Module:
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # torch does not count the grouped products of the other implementations.
    model.set_experts_implementation("eager")
    return model


def test_of_a_mixture_the_experts_of_a_token_count() -> None:
    model = mixture(head_dim=8)
    found = counted(model)
    tokens = 2 * LENGTH
    assert found.of(batch(), tokens) == computed(model, batch())


def test_documents_of_a_packed_row_do_not_attend_to_each_other() -> None:
    found = counted(llama())
    packed = {
        "input_ids": torch.zeros(1, 10, dtype=torch.long),
        "labels": torch.zeros(1, 10, dtype=torch.long),
        "attention_mask": torch.tensor([[1] * 9 + [0]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 0]]),
    }
    assert document_lengths(packed).tolist() == [4, 2, 3]
    padded = {name: packed[name] for name in ("input_ids", "labels", "attention_mask")}
    assert document_lengths(padded).tolist() == [9]
    squares = 4**2 + 2**2 + 3**2
    assert found.of(packed, 0) == sum(found.of(batch(1, length), 0) for length in (4, 2, 3))
    assert found.of(padded, 0) - found.of(packed, 0) == 12 * HIDDEN * LAYERS * (9**2 - squares)


def test_a_query_of_a_windowed_layer_has_at_most_as_many_keys_as_the_window() -> None:
    config = transformers.Qwen3Config(
        **{name: value for name, value in SIZES.items() if name != "num_experts_per_tok"},
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=4,
        use_sliding_window=True,
        head_dim=8,
    )
    found = counted(AutoModelForCausalLM.from_config(config))
    of_half = found.of(batch(rows=1, length=LENGTH // 2), 0)
    # A query of the windowed layer has 4 keys in both.
    assert found.of(batch(rows=1), 0) - 2 * of_half == 12 * 16 * LENGTH**2 // 2


def test_of_a_model_with_images_the_language_model_counts() -> None:
    config, processor = FAMILIES["llava"]()
    config.get_text_config().vocab_size = len(processor.tokenizer)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    text = AutoModelForCausalLM.from_config(config.get_text_config(), attn_implementation="eager")
    assert counted(model) == counted(text)
    freeze(model, ["vision_tower", "projector"])
    assert counted(model) == counted(text)
