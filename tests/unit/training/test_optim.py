"""The default optimizer scales gradients as it reads them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from automodel_ckpt.distributed.parallelize import clip_gradients
from automodel_ckpt.training.optim import FusedAdamW, adamw


def made() -> FusedAdamW:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return adamw(parameters, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def moments_after_a_step(limit: float | None, *, in_step: bool) -> tuple[float, list[torch.Tensor]]:
    """The gradient norm, and the first moments: a tenth of the gradients that the step saw."""
    optimizer = made()
    parameters = optimizer.param_groups[0]["params"]
    divide: Callable[[float], None] | None = optimizer.divide_in_step if in_step else None
    norm = clip_gradients(parameters, limit, in_step=divide)
    optimizer.step()
    return norm, [optimizer.state[parameter]["exp_avg"] for parameter in parameters]


@pytest.mark.parametrize("limit", [None, 0.5, 100.0])
def test_gradients_clipped_in_the_step_are_those_clipped_before_it(limit: float | None) -> None:
    before, in_step = (moments_after_a_step(limit, in_step=way) for way in (False, True))
    assert before[0] == in_step[0]
    torch.testing.assert_close(in_step[1], before[1], rtol=1e-6, atol=0)
    size = math.sqrt(sum(float(moment.square().sum()) for moment in in_step[1])) / 0.1
    assert size == pytest.approx(min(limit or math.inf, before[0]), rel=1e-4)


def test_only_the_next_step_divides() -> None:
    optimizer, plain = made(), made()
    optimizer.divide_in_step(4.0)
    optimizer.step()
    optimizer.state.clear()
    optimizer.param_groups[0]["params"][0].grad = plain.param_groups[0]["params"][0].grad
    optimizer.step()
    plain.step()
    states = [each.state[each.param_groups[0]["params"][0]]["exp_avg"] for each in (optimizer, plain)]
    assert torch.equal(*states)
