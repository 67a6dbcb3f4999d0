"""Attention to later tokens: which layers of a model follow the setting is found by running it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from automodel_ckpt.models.attention.attention_direction import attend_both_ways, causal_layers
from automodel_ckpt.parallel.model_layers import decoder_layers
from tests.support.models.sizes import model_sizes

SIZES: dict[str, Any] = {
    **model_sizes(vocab=8, hidden=32, inner=32, layers=4, heads=2, kv_heads=2),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("qwen3", {"head_dim": 16}, []),
        # Attention in chunks is causal where a row has padding.
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 32}, [0, 1, 2]),
        # Convolutions in every second layer.
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, [0, 2]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_without_attention_to_later_tokens_are_found(
    kind: str, options: dict[str, Any], expected: list[int], dtype: torch.dtype
) -> None:
    for is_changed in (True, False):
        config = AutoConfig.for_model(kind, **SIZES, **options)
        if is_changed:
            assert attend_both_ways(config)
        torch.manual_seed(0)
        model = AutoModel.from_config(config, dtype=dtype)
        found = causal_layers(model, decoder_layers(model), 1, {"use_cache": False})
        assert found == (expected if is_changed else [0, 1, 2, 3])


def test_an_encoder_stays_as_it_is() -> None:
    config = AutoConfig.for_model("bert")
    before = config.to_dict()
    assert not attend_both_ways(config)
    assert config.to_dict() == before
