"""The default optimizer does what torch's does, and scales gradients as it reads them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.optim.build import FusedAdamW
from automodel_ckpt.parallel.gradients import clip_gradients


def made() -> FusedAdamW:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return FusedAdamW(parameters, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


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


def trained(
    optimizer_class: type[torch.optim.AdamW], seed: int, **settings: Any
) -> tuple[list[torch.Tensor], Any]:
    """Three parameters in two groups after four steps, in the second of which one has no gradient; and the state."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (5,), (0, 2)]
    ]
    parameters[0].data = (
        parameters[0].data if settings.pop("whole", True) else parameters[0].data.t()
    )
    groups = [
        {"params": parameters[:1], "lr": 0.05},
        {"params": parameters[1:], "betas": (0.5, 0.6)},
    ]
    optimizer = optimizer_class(groups, lr=0.1, weight_decay=0.1, fused=True, **settings)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameters[1].grad = None if step == 1 else parameters[1].grad
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters], optimizer.state_dict()


@pytest.mark.parametrize(
    "settings", [{}, {"amsgrad": True}, {"maximize": True}, {"whole": False}], ids=str
)
def test_parameters_and_state_are_those_of_torch(settings: dict[str, Any]) -> None:
    (ours, our_state), (theirs, their_state) = (
        trained(each, 3, **settings) for each in (FusedAdamW, torch.optim.AdamW)
    )
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert our_state["param_groups"] == their_state["param_groups"]
    for number, state in their_state["state"].items():
        assert our_state["state"][number].keys() == state.keys()
        assert all(torch.equal(our_state["state"][number][name], state[name]) for name in state)
