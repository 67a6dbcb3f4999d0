"""Losses of single positions, computed in chunks whose logits are computed again in the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automodel_ckpt.models.loss import head_gradients
from automodel_ckpt.models.loss.fused_cross_entropy import IDENTITY, Labeled, LogitTransform
from automodel_ckpt.models.loss.position_losses import position_losses


@pytest.mark.parametrize("transform", [IDENTITY, LogitTransform(0.5, 3.0)])
@pytest.mark.parametrize("num_positions", [0, 11])
def test_losses_and_gradients_are_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, transform: LogitTransform, num_positions: int
) -> None:
    # Four positions in a chunk.
    monkeypatch.setitem(head_gradients.CHUNK_ELEMENTS, "cpu", 4 * 7)
    torch.manual_seed(0)
    layer = nn.Linear(5, 7)
    hidden = torch.randn(num_positions, 5, requires_grad=True)
    labels = torch.arange(num_positions) % 7
    weights = torch.randn(num_positions)
    expected = F.cross_entropy(transform(layer(hidden)), labels, reduction="none")
    inputs = [hidden, *layer.parameters()]
    gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    labeled = Labeled(hidden, labels, transform)
    found = position_losses(labeled, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected)
    for gradient, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs), gradients, strict=True
    ):
        torch.testing.assert_close(gradient, other)


def test_the_weight_of_a_position_is_not_rounded_to_bfloat16() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 7).bfloat16()
    hidden = torch.randn(64, 5, dtype=torch.bfloat16, requires_grad=True)
    losses = position_losses(Labeled(hidden, torch.arange(64) % 7), layer.weight, layer.bias)
    [once] = torch.autograd.grad(losses.sum(), hidden, retain_graph=True)
    # In bfloat16, the weight is 1.2969.
    [weighted] = torch.autograd.grad((1.3 * losses).sum(), hidden)
    ratio = weighted.double().norm() / once.double().norm()
    assert ratio.item() == pytest.approx(1.3, abs=1e-3)
