"""Plans for tensor parallelism: what is made of a model's own or a hand-written one, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.tensor_parallel import (
    apply_plan,
    check_heads,
    check_plan_support,
    plan_for,
)
from tests.support.models.sizes import model_sizes
from tests.support.runs.parallel import config_of


def on_meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("config", "given", "what"),
    [
        (
            GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9),
            None,
            "has no tensor parallel plan",
        ),
        (
            config_of(),
            {"model.layers.*.mlp.up_prj": "colwise", "lm_head": "colwise_rep"},
            "model.layers.*.mlp.up_prj (matches no module)",
        ),
        (config_of(), {"lm_head": "sideways"}, "'sideways'"),
        (
            config_of(),
            {"model.layers.*.mlp.up_proj.weight": "colwise", "lm_head": "colwise"},
            "mlp.up_proj.weight (a parameter)",
        ),
        (config_of(intermediate_size=45), None, "(out_features 45 is not a multiple)"),
        (
            MixtralConfig(
                **model_sizes(hidden=8, inner=8, layers=1, heads=2, vocab=9, kv_heads=2),
                num_local_experts=2,
            ),
            None,
            "mlp.experts (experts)",
        ),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(config: Any, given: Any, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_for(on_meta(config), given, 2)
    assert what in str(caught.value)


def test_parameters_that_are_used_without_their_layer_are_explained() -> None:
    error = RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert all")
    check_plan_support(error, 1)
    check_plan_support(RuntimeError("another one"), 2)
    with pytest.raises(RecipeError, match="without calling"):
        check_plan_support(error, 2)


def test_heads_that_cannot_be_shared_out_are_named() -> None:
    check_heads(config_of(num_key_value_heads=2), 2)
    with pytest.raises(RecipeError) as caught:
        check_heads(config_of(hidden_size=48, num_attention_heads=12, num_key_value_heads=6), 4)
    assert "num_key_value_heads 6" in str(caught.value)
    assert "set tp_size to a common divisor" in str(caught.value)


def test_sequence_parallelism_is_refused_for_another_structure() -> None:
    plain = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(RecipeError, match="built like Llama and Qwen"):
        apply_plan(plain, {}, None, sequence_parallel=True)  # type: ignore[arg-type]
