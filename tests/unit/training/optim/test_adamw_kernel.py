"""The Triton kernel of AdamW, beside torch's and float64. On a CPU it runs in Triton's interpreter (`make kernels`)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.optim import build as optim
from automodel_ckpt.optim.build import FusedAdamW
from tests.support import ranks
from tests.support.runs.parallel import values_after_steps

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)

BLOCK = 64
SIZES = [1, 63, 64, 65, 200, 1024]
BETAS = (0.875, 0.96875)
"""Not rounded in float32."""
SETTINGS: dict[str, Any] = {"lr": 0.03, "beta1": BETAS[0], "beta2": BETAS[1], "eps": 1e-3}
Rows = list[list[torch.Tensor]]
"""Parameters, gradients, averages, squares and steps."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from automodel_ckpt.optim import adamw_kernel

    monkeypatch.setattr(adamw_kernel, "_BLOCK", BLOCK)


def made(sizes: list[int], step: float = 0) -> Rows:
    """Random tensors; squares are not negative. Each tensor was updated *step* times more often than the one before."""
    generator = torch.Generator().manual_seed(len(sizes))
    numbers = [[torch.randn(size, generator=generator) for size in sizes] for _ in range(4)]
    numbers[3] = [each.square() for each in numbers[3]]
    steps = [torch.tensor(1.0 + step * index) for index in range(len(sizes))]
    return [[each.to(DEVICE) for each in row] for row in (*numbers, steps)]


def copied(rows: Rows, dtype: torch.dtype = torch.float32) -> Rows:
    return [[each.to(dtype, copy=True) for each in row] for row in rows]


def updated_in_float64(rows: Rows, decay: float, divisor: float) -> Rows:
    """The update of arXiv:1711.05101, algorithm 2, with the decay scaled by the rate."""
    rate, beta1, beta2 = (SETTINGS[name] for name in ("lr", "beta1", "beta2"))
    parameters, gradients, averages, squares, steps = copied(rows, torch.float64)
    for index, step in enumerate(steps):
        gradient = gradients[index] / divisor
        averages[index] = beta1 * averages[index] + (1 - beta1) * gradient
        squares[index] = beta2 * squares[index] + (1 - beta2) * gradient.square()
        average = averages[index] / (1 - beta1 ** step.item())
        root = (squares[index] / (1 - beta2 ** step.item())).sqrt()
        change = average / (root + SETTINGS["eps"])
        parameters[index] = (1 - rate * decay) * parameters[index] - rate * change
    return [parameters, averages, squares]


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("flag", [None, 0.0])
def test_the_update_is_that_of_torch_and_of_float64(
    decay: float, divisor: float | None, flag: float | None
) -> None:
    from automodel_ckpt.optim import adamw_kernel

    rows = made(SIZES, step=7)
    torchs = copied(rows)
    options = {
        **SETTINGS,
        "weight_decay": decay,
        "grad_scale": None if divisor is None else scalar(divisor),
        "found_inf": None if flag is None else scalar(flag),
    }
    for _ in range(4):
        exact = updated_in_float64(rows, decay, divisor or 1.0)
        gradients = [each.clone() for each in rows[1]]
        adamw_kernel.update(*rows, **options)
        assert all(torch.equal(*pair) for pair in zip(rows[1], gradients, strict=True))
        torch._fused_adamw_(*torchs[:4], [], torchs[4], **options, amsgrad=False, maximize=False)
        torchs[1] = [each.clone() for each in gradients]
        for found, expected in zip((rows[0], rows[2], rows[3]), exact, strict=True):
            for each, exactly in zip(found, expected, strict=True):
                torch.testing.assert_close(each.double(), exactly, rtol=1e-6, atol=1e-6)
        for kind in (0, 2, 3):
            for each, other in zip(rows[kind], torchs[kind], strict=True):
                torch.testing.assert_close(each, other, rtol=1e-6, atol=1e-6)
        for row in (rows, torchs):
            torch._foreach_add_(row[4], 1)


def test_a_flag_on_the_device_leaves_all_as_it_is() -> None:
    from automodel_ckpt.optim import adamw_kernel

    rows = made(SIZES)
    before = copied(rows)
    adamw_kernel.update(*rows, **SETTINGS, weight_decay=0.1, found_inf=scalar(1.0))
    for row, kept in zip(rows, before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(row, kept, strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that the kernel updates in a FusedAdamW, also on a CPU."""
    from automodel_ckpt.optim import adamw_kernel

    calls: list[int] = []

    def counted(parameters: list[torch.Tensor], *others: Any, **options: Any) -> None:
        calls.extend(each.numel() for each in parameters)
        adamw_kernel.update(parameters, *others, **options)

    monkeypatch.setattr(optim, "LEAST_ELEMENTS", 64)
    monkeypatch.setattr(optim, "_counts_on_host", lambda steps: False)
    monkeypatch.setattr(optim, "_large_update", lambda device: counted)
    return calls


def after_steps(optimizer_class: type[torch.optim.AdamW]) -> tuple[list[torch.Tensor], Any]:
    """Parameters of several sizes, types of memory and groups after five steps, one of them left out; and the state."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(9, 8), (5,), (8, 9), (64,), (63,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    parameters[2] = nn.Parameter(parameters[2].detach().t())
    parameters = [nn.Parameter(each.detach().to(DEVICE)) for each in parameters]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:3]},
        {"params": parameters[3:], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": 0.05, "betas": BETAS, "eps": 1e-3, "weight_decay": 0.3}
    optimizer: Any = optimizer_class(groups, **options, fused=True)
    for step in range(5):
        for parameter in parameters:
            numbers = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            parameter.grad = torch.empty_like(parameter).copy_(numbers)
        optimizer.grad_scale = scalar(2.0) if step > 2 else None
        optimizer.found_inf = scalar(float(step == 3))
        optimizer.step()
    return [each.detach() for each in parameters], optimizer.state_dict()


def test_one_step_updates_large_and_small_tensors(calls: list[int]) -> None:
    parameters, state = after_steps(FusedAdamW)
    # Not the small ones, and not the transposed matrix.
    assert calls == [72, 64] * 5
    expected, expected_state = after_steps(torch.optim.AdamW)
    for each, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=2e-6, atol=1e-6)
    assert state["param_groups"] == expected_state["param_groups"]
    for number, entry in expected_state["state"].items():
        found = state["state"][number]
        assert found.keys() == entry.keys() and found["step"].item() == 4
        for name in entry:
            torch.testing.assert_close(found[name], entry[name], rtol=2e-6, atol=1e-6)


@pytest.mark.skipif(
    not INTERPRETED or torch.cuda.is_available(),
    reason="two ranks of gloo have no GPU each, and are forks of a process that may have used it",
)
def test_shards_are_updated_as_by_torch(calls: list[int]) -> None:
    def on_two_ranks() -> None:
        ours, theirs = (values_after_steps(each) for each in (FusedAdamW, torch.optim.AdamW))
        assert len(calls) > 3
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    ranks.run(on_two_ranks, 2)


def test_the_kernel_can_be_tried() -> None:
    from automodel_ckpt.optim import adamw_kernel

    adamw_kernel.try_once(torch.device(DEVICE))
