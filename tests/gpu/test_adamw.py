"""AdamW on a GPU: its kernel for large tensors beside torch's, and a step that does not wait for the device."""

import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.optim import build as optim
from automodel_ckpt.optim.build import FusedAdamW
from tests.support.gpu import only_gpu

pytest.importorskip("triton")
pytestmark = only_gpu

RATE = 1e-3
GRADIENT = 1e-4
LEAST = 2**12
TOLERANCE = 2**-22 if os.environ.get("TRITON_INTERPRET") != "1" else 2e-5
"""One or two units in the last place; the kernel of torch for CPUs has another order of operations."""
SHAPES = [(64, 64), (2**12 + 5,), (1000,), (3, 2**12)]
"""Three are large, one of them without a divisor of 4; the third is small."""


@pytest.fixture(autouse=True)
def updated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tensors that the kernel for large ones updates."""
    sizes: list[int] = []
    update = optim._large_update(torch.device("cuda", torch.cuda.current_device()))
    assert update is not None

    def counted(parameters: list[torch.Tensor], *others: Any, **options: Any) -> None:
        sizes.extend(each.numel() for each in parameters)
        update(parameters, *others, **options)

    monkeypatch.setattr(optim, "LEAST_ELEMENTS", LEAST)
    monkeypatch.setattr(optim, "_large_update", lambda device: counted)
    return sizes


def optimizer_of(optimizer_class: type[torch.optim.AdamW], decay: float) -> torch.optim.AdamW:
    generator = torch.Generator("cuda").manual_seed(1)
    parameters = [
        nn.Parameter(torch.randn(shape, device="cuda", generator=generator)) for shape in SHAPES
    ]
    return optimizer_class(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=decay, fused=True)


def steps(optimizer: Any, divisor: float | None, numbers: range) -> None:
    """Steps with random gradients, most of them small, some zero; every third step is left out by a flag."""
    for number in numbers:
        generator = torch.Generator("cuda").manual_seed(number)
        for parameter in optimizer.param_groups[0]["params"]:
            gradient = torch.randn(parameter.shape, device="cuda", generator=generator)
            parameter.grad = gradient.pow(3).mul_(GRADIENT) * (gradient > -1)
        if divisor is not None:
            optimizer.grad_scale = torch.full((), divisor, device="cuda")
        optimizer.found_inf = torch.full((), float(number % 3 == 2), device="cuda")
        optimizer.step()


def num_compiled() -> int:
    """How often the kernel was compiled; 0 if it is interpreted."""
    from automodel_ckpt.optim import adamw_kernel

    caches = getattr(adamw_kernel._update, "device_caches", {})
    return sum(len(cache[0]) for cache in caches.values())


@pytest.mark.parametrize("divisor", [None, 1.7])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weights_and_moments_are_those_of_torch(
    decay: float, divisor: float | None, updated: list[int]
) -> None:
    ours, theirs = (optimizer_of(each, decay) for each in (FusedAdamW, torch.optim.AdamW))
    for optimizer in (ours, theirs):
        steps(optimizer, divisor, range(7))
    large = [size for size in map(math.prod, SHAPES) if size >= LEAST]
    assert len(large) == 3
    assert updated == large * 7
    states = [list(each.state.items()) for each in (ours, theirs)]
    for (parameter, state), (other, other_state) in zip(*states, strict=True):
        assert state["step"].item() == other_state["step"].item() == 5
        # Relative to a value, or to the larger terms of a small one.
        for found, expected, largest in (
            (parameter, other, RATE),
            (state["exp_avg"], other_state["exp_avg"], GRADIENT),
            (state["exp_avg_sq"], other_state["exp_avg_sq"], 0.0),
        ):
            torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE * largest)


def test_other_settings_do_not_compile_again_and_no_step_waits() -> None:
    optimizer = optimizer_of(FusedAdamW, 0.1)
    steps(optimizer, 2.0, range(2))
    before = num_compiled()
    group = optimizer.param_groups[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            group["lr"], group["betas"], group["eps"] = (
                1e-4 * number,
                (0.1 * number, 0.9),
                10**-number,
            )
            steps(optimizer, 2.0, range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert num_compiled() == before


def test_a_step_that_divides_reads_gradients_and_does_not_store_them() -> None:
    optimizer: Any = optimizer_of(FusedAdamW, 0.0)
    steps(optimizer, None, range(1))
    kept = [each.grad.clone() for each in optimizer.param_groups[0]["params"]]
    optimizer.divide_in_step(torch.full((), 2.0, device="cuda"))
    optimizer.step()
    large = [0, 1, 3]
    for index in large:
        assert torch.equal(optimizer.param_groups[0]["params"][index].grad, kept[index])
