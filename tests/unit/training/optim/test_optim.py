"""The default optimizer does what torch's does, and scales gradients as it reads them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from automodel_ckpt.optim.build import FusedAdamW, adamw
from automodel_ckpt.parallel.gradient_norm import clip_gradients


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


@pytest.mark.parametrize("by_torch", [False, True], ids=["our step", "torch's step"])
def test_only_the_next_step_divides(by_torch: bool) -> None:
    optimizer, plain = made(), made()
    if by_torch:  # a hook: torch calls it, so the step is torch's own
        optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.divide_in_step(4.0)
    optimizer.step()
    optimizer.state.clear()
    # A copy: torch divides gradients in place, and the plain optimizer must not see that.
    optimizer.param_groups[0]["params"][0].grad = plain.param_groups[0]["params"][0].grad.clone()
    optimizer.step()
    plain.step()
    states = [
        each.state[each.param_groups[0]["params"][0]]["exp_avg"] for each in (optimizer, plain)
    ]
    assert torch.equal(*states)


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


def loads_another_state(optimizer: Any) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    for number, entry in enumerate(state["state"].values()):
        entry["step"] += 10 * number
        entry["exp_avg"] += 1
    optimizer.load_state_dict(state)
    return optimizer


def gets_other_tensors(optimizer: Any) -> Any:
    first, second = list(optimizer.state.values())[:2]
    first["step"], first["exp_avg"] = torch.tensor(7.0), first["exp_avg"] + 1
    second["exp_avg_sq"] = second["exp_avg_sq"] * 2
    return optimizer


def gets_another_entry(optimizer: Any) -> Any:
    parameter = optimizer.param_groups[1]["params"][0]
    optimizer.state[parameter] = copy.deepcopy(optimizer.state[parameter])
    optimizer.state[parameter]["exp_avg"].mul_(3)
    return optimizer


def starts_anew(optimizer: Any) -> Any:
    optimizer.state.clear()
    return optimizer


def counts_in_place(optimizer: Any) -> Any:
    for entry in optimizer.state.values():
        entry["step"].fill_(5)
    return optimizer


@pytest.mark.parametrize(
    "happening",
    [
        loads_another_state,
        gets_other_tensors,
        gets_another_entry,
        starts_anew,
        counts_in_place,
        copy.deepcopy,
    ],
)
def test_what_happens_to_the_state_between_steps_counts_as_with_torchs(
    happening: Callable[[Any], Any],
) -> None:
    after = []
    for optimizer_class in (FusedAdamW, torch.optim.AdamW):
        generator = torch.Generator().manual_seed(1)
        parameters = [
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (5,), (2,)]
        ]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        optimizer: Any = optimizer_class(groups, lr=0.1, fused=True)
        for step in range(4):
            optimizer = happening(optimizer) if step == 2 else optimizer
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        after.append((optimizer, parameters, optimizer.state_dict()["state"]))
    (ours, our_parameters, our_state), (theirs, their_parameters, their_state) = after
    mine, yours = (
        [p for group in each.param_groups for p in group["params"]] for each in (ours, theirs)
    )
    assert all(
        torch.equal(*pair)
        for pair in zip([*mine, *our_parameters], [*yours, *their_parameters], strict=True)
    )
    for number, entry in their_state.items():
        assert all(torch.equal(our_state[number][name], value) for name, value in entry.items())


def test_a_step_without_gradients_changes_nothing_and_hooks_are_called_once() -> None:
    optimizer, calls = made(), []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    before = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
    optimizer.zero_grad()
    optimizer.step()
    optimizer.step(lambda: 7.0)
    assert calls == ["after"] * 3
    assert all(
        torch.equal(*pair) for pair in zip(before, optimizer.param_groups[0]["params"], strict=True)
    )
    optimizer.param_groups[0]["params"][1].grad = torch.ones(5)
    optimizer.zero_grad(set_to_none=False)
    assert not optimizer.param_groups[0]["params"][1].grad.any()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.10
def test_a_profiler_and_hooks_of_all_optimizers_see_each_step_and_without_them_torch_calls_nothing() -> (
    None
):
    optimizer, calls = made(), []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.step()
    handle.remove()
    with torch.profiler.profile() as profiler:
        optimizer.step()
    assert calls == ["before"]
    assert [
        event.count
        for event in profiler.key_averages()
        if event.key.startswith("Optimizer.step#Fused")
    ] == [1]
    with mock.patch.object(torch.autograd.profiler, "record_function", side_effect=AssertionError):
        optimizer.step()


def test_a_scale_is_kept_for_what_torch_does_itself() -> None:
    ours, plain = made(), made()
    for optimizer, divisor in ((ours, 4.0), (plain, None)):
        optimizer.param_groups[0]["amsgrad"] = True
        if divisor:
            optimizer.divide_in_step(divisor)
        optimizer.step()
    moments = [each.state[each.param_groups[0]["params"][0]]["exp_avg"] for each in (ours, plain)]
    torch.testing.assert_close(4 * moments[0], moments[1])
