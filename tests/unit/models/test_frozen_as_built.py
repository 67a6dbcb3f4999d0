"""Parameters that a model's class creates without gradients, or keeps in float32, when the model is read from files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.config.sections.model import ModelConfig
from automodel_ckpt.recipes.model.deferred_model import DeferredModel, build_deferred

BIAS = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
"""It selects experts, is not trained, and stays in float32."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An ERNIE 4.5 mixture in bfloat16, whose router transformers reads in float32."""
    directory = tmp_path_factory.mktemp("base")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_num_experts": 4, "moe_intermediate_size": 8, "moe_k": 2}
    config = AutoConfig.for_model(
        "ernie4_5_moe", vocab_size=32, hidden_size=16, intermediate_size=16, **sizes, **experts
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return str(directory)


def built(base: str, dtype: Any, needs_values: str) -> DeferredModel:
    return build_deferred(
        ModelConfig(from_pretrained=base, dtype=dtype),
        AutoConfig.from_pretrained(base),
        base=base,
        auto_class=AutoModelForCausalLM,
        seed=1,
        group=None,
        needs_values=needs_values,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
@pytest.mark.parametrize("needs_values", ["", "the test asks for it"], ids=["parts", "complete"])
def test_a_bias_that_is_not_trained_stays_in_float32(
    dtype: str, needs_values: str, base: str
) -> None:
    deferred = built(base, dtype, needs_values)
    model = deferred.model
    if deferred.materialise is not None:
        deferred.materialise(model, torch.device("cpu"))
    assert (deferred.materialise is None) == bool(needs_values)
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    others = [name for name, each in model.named_parameters() if each.dtype != torch.bfloat16]
    assert frozen == others == [BIAS]
    assert model.get_parameter(BIAS).dtype == torch.float32
    read = AutoModelForCausalLM.from_pretrained(base, dtype="auto").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, read[name].to(value.dtype)), name
