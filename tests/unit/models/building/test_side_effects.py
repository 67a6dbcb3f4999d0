"""A forward pass of a few tokens, which finds out how a model behaves, leaves nothing behind."""

from __future__ import annotations

import torch
from torch import nn

from automodel_ckpt.models.inspect.forward import side_effect_free


def test_modes_and_the_random_state_are_as_before() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    model[1].eval()
    state = torch.get_rng_state()
    with side_effect_free(model):
        assert not model.training and not torch.is_grad_enabled()
        torch.rand(3)
    assert model.training and model[0].training and not model[1].training
    assert torch.equal(torch.get_rng_state(), state)
