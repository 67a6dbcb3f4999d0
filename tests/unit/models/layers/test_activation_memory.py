"""Activations that layers keep or recompute: the same gradients, and less memory."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention.by_document import attend_by_document
from automodel_ckpt.models.layers.activation_memory import checkpoint_activations
from automodel_ckpt.models.layers.compiling import compile_layers
from automodel_ckpt.training.gradients import selected_activations
from tests.unit.models.building.test_packing_probe import build, loss_and_gradients

pytestmark = [
    # Raised inside torch._dynamo, about its own question.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # peft's own use.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

MODES = ["full", "selective"]


def row() -> dict[str, torch.Tensor]:
    """Two documents in one row."""
    positions = torch.cat([torch.arange(20), torch.arange(12)])[None]
    tokens = (positions * 7 + 3) % 97
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens}


def model_with(mode: str | None, *, adapters: bool = False) -> Any:
    model = build("llama", "sdpa")
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    if mode is not None:
        checkpoint_activations(model, mode, layers_of(model))
    return model


def layers_of(model: Any) -> list[Any]:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return list(inner.model.layers)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_gradients_of_a_plain_pass(mode: str, adapters: bool) -> None:
    expected_loss, expected = loss_and_gradients(model_with(None, adapters=adapters), row())
    loss, gradients = loss_and_gradients(model_with(mode, adapters=adapters), row())
    assert loss == expected_loss
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_selective_layers_draw_the_same_dropout_when_they_recompute() -> None:
    losses = []
    for mode in (None, "selective"):
        model = model_with(mode)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        torch.manual_seed(5)
        losses.append(loss_and_gradients(model, row()))
    assert losses[0][0] == losses[1][0]
    for ours, theirs in zip(losses[0][1], losses[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "mode", ["full", *(pytest.param(mode, marks=pytest.mark.further) for mode in MODES[1:])]
)
def test_compiled_layers_recompute_too(mode: str) -> None:
    expected_loss, expected = loss_and_gradients(model_with(None), row())
    model = model_with(mode)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.register_backend(counter, name="counted_modes")
    try:
        compile_layers(layers_of(model), backend="counted_modes")
        loss, gradients = loss_and_gradients(model, row())
    finally:
        torch._dynamo.backends.registry._COMPILER_FNS.pop("counted_modes")
    assert counter.frame_count >= 1
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_documents_of_a_row_are_recomputed_in_every_mode(mode: str) -> None:
    expected_loss, expected = loss_and_gradients(model_with(None), row())
    model = model_with(mode)
    assert attend_by_document(model, {"use_cache": False})
    loss, gradients = loss_and_gradients(model, row())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_selected_is_an_error() -> None:
    with pytest.raises(RecipeError, match="no repeated layers"):
        checkpoint_activations(build("llama"), "selective", [])


class BiasInPlace(nn.Module):
    """A layer that adds a bias to a kept result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.weight).add_(self.bias).exp().tanh()


class MoreInEachCall(BiasInPlace):
    """A layer that computes more operations in each call."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            hidden = hidden + 1
        return (hidden @ self.weight).tanh()


@pytest.mark.parametrize("layer", [BiasInPlace, MoreInEachCall])
def test_layers_that_cannot_be_recomputed_selectively_are_an_error(layer: type) -> None:
    model: Any = nn.Sequential(layer())
    model.supports_gradient_checkpointing = True
    checkpoint_activations(model, "selective", list(model))
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(RecipeError, match="set it to full"), selected_activations():
        loss.backward()
