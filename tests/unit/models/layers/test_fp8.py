"""Which layers become layers of torchao, what they compute, and errors."""

import importlib.util

import pytest
import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.layers.fp8 import check_device, convert_to_fp8, fp8_layers
from tests.support.runs.parallel import model_of

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def test_layers_of_the_decoder_with_suitable_widths_are_converted() -> None:
    model = model_of(num_hidden_layers=2, intermediate_size=40)
    exclude = ["*.1.self_attn.*"]
    selected, num_odd = fp8_layers(model, exclude)
    assert selected == [f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
    assert num_odd == 6  # gate, up and down of width 40


def test_a_device_without_fp8_is_an_error_unless_it_is_emulated() -> None:
    check_device("cuda", (8, 9), emulate=False)
    check_device("cuda", (9, 0), emulate=False)
    for emulate, device, capability in ((False, "cpu", None), (False, "cuda", (8, 0))):
        with pytest.raises(RecipeError, match=r"fp8\.emulate"):
            check_device(device, capability, emulate=emulate)
        check_device(device, capability, emulate=True)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_without_torchao_the_error_names_the_extra() -> None:
    options = {"recipe": "tensorwise", "exclude": [], "emulate": True}
    with pytest.raises(RecipeError, match=r"automodel_ckpt\[fp8\]"):
        convert_to_fp8(model_of(), device=torch.device("cpu"), **options)


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_converted_model_has_the_same_state_and_about_the_same_logits(recipe: str) -> None:
    model = model_of().eval()
    tokens = torch.arange(16).view(1, 16)
    expected = model(input_ids=tokens).logits
    state = {name: value.data_ptr() for name, value in model.state_dict().items()}
    convert_to_fp8(
        model, recipe=recipe, exclude=["*down_proj"], emulate=True, device=torch.device("cpu")
    )
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == state
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is not nn.Linear
    logits = model(input_ids=tokens).logits
    error = (logits - expected).norm() / expected.norm()
    assert 1e-4 < error.item() < 0.2
