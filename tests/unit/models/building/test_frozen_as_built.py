"""Parameters that a model's class creates without gradients, or keeps in float32, when the model is read from files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
)

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.training.model.deferred_model import DeferredModel, build_deferred

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


def built(
    base: str, dtype: Any, needs_values: str, auto_class: Any = AutoModelForCausalLM
) -> DeferredModel:
    return build_deferred(
        ModelConfig(from_pretrained=base, dtype=dtype),
        AutoConfig.from_pretrained(base),
        base=base,
        auto_class=auto_class,
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
    if needs_values:
        assert deferred.materialise is None
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    assert frozen == [BIAS]
    kept = {name for name, each in model.named_parameters() if each.dtype == torch.float32}
    assert kept == {BIAS, "model.layers.1.mlp.gate.weight"}
    _check_as_read(model, AutoModelForCausalLM.from_pretrained(base, dtype="auto"))


def _check_as_read(model: nn.Module, read: nn.Module) -> None:
    """Parameters and buffers have the types and values of those that transformers reads."""
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(read, kind)())
        found = dict(getattr(model, kind)())
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value.dtype == expected[name].dtype, name
            assert torch.equal(value, expected[name]), name


def test_parameters_that_stay_in_float32_are_read_in_parts(tmp_path: Path) -> None:
    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).half().save_pretrained(tmp_path)
    deferred = built(str(tmp_path), "float16", "", AutoModelForSeq2SeqLM)
    assert deferred.materialise is not None
    deferred.materialise(deferred.model, torch.device("cpu"))
    read = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    _check_as_read(deferred.model, read)
    of_output = deferred.model.get_parameter("encoder.block.0.layer.1.DenseReluDense.wo.weight")
    assert of_output.dtype == torch.float32
