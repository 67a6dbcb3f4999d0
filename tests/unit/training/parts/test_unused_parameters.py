"""Parameters without a gradient: the patterns to leave them out match no parameter that is used."""

import pytest
import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.gradients import check_all_trained


def model_of(used: list[str], unused: list[str]) -> nn.Module:
    """A model with parameters of these dotted names, of which those in *used* have a gradient."""
    model = nn.Module()
    for name in (*used, *unused):
        *parents, last = name.split(".")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1) if name in used else None
        module.register_parameter(last, parameter)
    return model


@pytest.mark.parametrize(
    ("used", "unused", "patterns"),
    [
        (["layers.0.up.weight"], ["norm.weight", "norm.bias"], "['norm.bias', 'norm.weight']"),
        (
            ["layers.0.up.weight"],
            ["layers.0.gate.weight", "layers.1.gate.weight"],
            "['layers.*.gate.weight']",
        ),
    ],
)
def test_the_patterns_match_unused_parameters_only(
    used: list[str], unused: list[str], patterns: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(used, unused)
    check_all_trained(model, has_adapters=False, is_error=False)
    assert f"model.freeze: {patterns}" in caplog.text
    with pytest.raises(RecipeError, match="if no batch uses them, freeze them"):
        check_all_trained(model, has_adapters=False, is_error=True)
    check_all_trained(model, has_adapters=False, is_error=True, is_resumed=True)
    assert "the checkpoint has them among the trained ones, so they stay as they are" in caplog.text


def test_adapters_of_other_layers_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    prefix = "base_model.model.layers"
    used = [f"{prefix}.0.up.lora_A.default.weight", f"{prefix}.0.up.lora_B.default.weight"]
    unused = [f"{prefix}.1.up.lora_A.default.weight", f"{prefix}.1.up.lora_B.default.weight"]
    check_all_trained(model_of(used, unused), has_adapters=True, is_error=False)
    assert "1 of them: layers.1.up; " in caplog.text
    assert "peft.exclude_modules: ['layers.1.up']" in caplog.text
