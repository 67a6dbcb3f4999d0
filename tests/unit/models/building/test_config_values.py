"""Values of configurations: those of single layers, and the length of the context."""

from typing import Any

import pytest
from transformers import Gemma4TextConfig, LlamaConfig

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.config_reading import config_of_layer, layer_configs
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.training.model.sections import check_all_heads


def gemma4() -> Any:
    config = Gemma4TextConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        head_dim=8,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
    )
    if not getattr(config, "is_heterogeneous", False):
        pytest.skip("this version of transformers has one configuration for all layers")
    return config


def test_each_layer_has_its_own_values() -> None:
    config = gemma4()
    assert [layer.head_dim for layer in layer_configs(config)] == [8, 16]
    assert config_of_layer(config, 1).num_key_value_heads == 1
    assert config_of_layer(config, 2) is config
    assert layer_configs(LlamaConfig()) == [LlamaConfig()]


def test_heads_of_every_layer_have_to_be_divisible() -> None:
    check_all_heads(gemma4(), Sizes(cp=4))
    with pytest.raises(RecipeError, match="num_key_value_heads 1"):
        check_all_heads(gemma4(), Sizes(tp=2))
