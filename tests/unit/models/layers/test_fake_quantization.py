"""Fake quantization: the grid of compressed-tensors, exact gradients, and models that cannot be quantized."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, MixtralConfig

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.layers.fake_quantization import SCHEMES, FakeQuantization, Grid
from tests.support.models.mtp import HYBRID
from tests.support.runs.parallel import model_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_rounded_to_the_values_of_compressed_tensors(
    name: str, dtype: torch.dtype
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    scheme = quantization.preset_name_to_scheme(name, ["Linear"])
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    groups = weight.reshape(16, -1, scheme.weights.group_size or 256)
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    expected = forward.fake_quantize(weight, scale, zero, scheme.weights)
    assert torch.equal(SCHEMES[name].weights.rounded(weight), expected)
    assert (SCHEMES[name].inputs is None) == (scheme.input_activations is None)


@pytest.mark.parametrize(
    ("grid", "values", "expected"),
    [
        # Scales of 15 / 15 and 30 / 15: codes from -8 to 7, halves to the even code.
        (
            Grid(4, group_size=4),
            [7.5, 1.2, -3.6, 0.4, -15.0, 3.0, 1.0, 5.0],
            [7.0, 1.0, -4.0, 0.0, -16.0, 4.0, 0.0, 4.0],
        ),
        # One scale of 255 / 255 for the row.
        (Grid(8), [127.5, -127.4, 0.6, -0.4], [127.0, -127.0, 1.0, 0.0]),
        # One scale of 448 / 448: three bits of mantissa.
        (Grid(8, is_float=True), [448.0, -17.0, 100.0, 3.3], [448.0, -16.0, 96.0, 3.25]),
    ],
)
def test_values_are_rounded_to_the_nearest_code_of_their_group(
    grid: Grid, values: list[float], expected: list[float]
) -> None:
    assert grid.rounded(torch.tensor([values])).tolist() == [expected]


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC"])
def test_gradients_pass_the_rounding_unchanged(name: str) -> None:
    model: Any = model_of()
    quantized = FakeQuantization(model, name, None, start_step=0)
    # Seven matrices in each of two layers; the output layer is not among them.
    assert quantized.num_layers == 14
    layer = model.model.layers[0].mlp.gate_proj
    layer.bias = torch.nn.Parameter(torch.randn(layer.out_features))
    inputs = torch.randn(2, 3, layer.in_features, requires_grad=True)
    output = layer(inputs)
    output.square().sum().backward()
    ours = [inputs.grad, layer.weight.grad, layer.bias.grad]
    scheme, plain = SCHEMES[name], inputs.detach().requires_grad_()
    weight = layer.weight.detach().requires_grad_()
    bias = layer.bias.detach().requires_grad_()
    assert scheme.inputs is not None
    rounded = plain + (scheme.inputs.rounded(plain) - plain).detach()
    values = weight + (scheme.weights.rounded(weight) - weight).detach()
    expected = F.linear(rounded, values, bias)
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected)
    assert not torch.allclose(output, F.linear(plain, weight, bias), rtol=1e-4)
    for found, value in zip(ours, (plain.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)


def test_the_convolutions_of_linear_attention_keep_their_precision() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = CONFIG_MAPPING["qwen3_5_text"](**sizes, **heads, **HYBRID)
    model: Any = AutoModelForCausalLM.from_config(config)
    linear_layers = [each for each in model.model.modules() if isinstance(each, torch.nn.Linear)]
    convolutions = [each for each in model.modules() if isinstance(each, torch.nn.Conv1d)]
    assert FakeQuantization(model, "W8A8", None, start_step=0).num_layers == len(linear_layers)
    assert len(convolutions) == 1
    assert "forward" in vars(linear_layers[0]) and "forward" not in vars(convolutions[0])
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    assert convolutions[0].weight.grad is not None


def test_models_that_cannot_be_quantized_are_rejected() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    experts: Any = AutoModelForCausalLM.from_config(
        MixtralConfig(**sizes, **heads, num_local_experts=2)
    )
    with pytest.raises(RecipeError, match="fused experts"):
        FakeQuantization(experts, "W8A8", None, start_step=0)
    narrow: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    with pytest.raises(RecipeError, match=r"not divisible by 128"):
        FakeQuantization(narrow, "W4A16", None, start_step=0)
