"""The Triton kernel of AdamW, beside torch's and float64. On a CPU it runs in Triton's interpreter (`make kernels`)."""

import os
from typing import Any

import pytest
import torch

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
