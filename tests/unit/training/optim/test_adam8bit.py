"""AdamW with 8-bit moments: its table and its codes, the size of its state, and how close it stays to AdamW."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.optim.adam8bit import AdamW8bit, divided, joined


def test_rows_without_a_gradient_in_most_steps_change_as_with_moments_in_float32() -> None:
    torch.manual_seed(0)
    narrow, wide = (nn.Parameter(torch.zeros(64, 256)) for _ in range(2))
    optimizers = [
        AdamW8bit([narrow], lr=1e-4, weight_decay=0),
        torch.optim.AdamW([wide], lr=1e-4, weight_decay=0),
    ]
    largest = torch.zeros(2)
    for step in range(4):
        # The values of a row differ by up to four powers of ten.
        gradient = torch.randn(64, 256) * torch.logspace(-4, 0, 256) * 1e-3
        gradient[torch.arange(64) % 2 == step % 2] = 0
        for number, (parameter, optimizer) in enumerate(
            zip((narrow, wide), optimizers, strict=True)
        ):
            before = parameter.detach().clone()
            parameter.grad = gradient.clone()
            optimizer.step()
            change = (parameter.detach() - before).abs().max()
            largest[number] = torch.maximum(largest[number], change)
    # A second moment that is rounded to 0 gives 40 times as much.
    assert largest[0] < 1.5 * largest[1]


def trained(
    optimizer_class: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[float], torch.optim.Optimizer]:
    """The losses of 60 steps of a small regression in *dtype*, and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).to(dtype)
    inputs = torch.randn(256, 64, generator=generator).to(dtype)
    targets = torch.randn(256, 8, generator=generator).to(dtype)
    optimizer = optimizer_class(model.parameters(), lr=3e-3, **options)
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, optimizer


def test_losses_stay_close_to_those_of_adamw() -> None:
    expected, _ = trained(torch.optim.AdamW)
    losses, _ = trained(AdamW8bit, min_elements=512)
    assert expected[-1] < 0.6 * expected[0]
    assert losses == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("further_bytes", [0, 2])
def test_the_state_of_a_large_matrix_takes_two_bytes_for_each_element(further_bytes: int) -> None:
    matrix = nn.Parameter(torch.randn(64, 4096, dtype=torch.bfloat16))
    vector = nn.Parameter(torch.randn(8192))
    narrow = nn.Parameter(torch.randn(4096, 17))
    optimizer = AdamW8bit([matrix, vector, narrow], float32_weights=further_bytes > 0)
    for parameter in (matrix, vector, narrow):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    sizes = [
        sum(value.nbytes for value in optimizer.state[parameter].values()) / parameter.numel()
        for parameter in (matrix, vector, narrow)
    ]
    assert sizes == pytest.approx([further_bytes + 2 + 8 / 256, 8, 8], rel=1e-3)
    for parameter in (matrix, vector, narrow):
        described = optimizer.state_like(parameter)
        assert described.keys() == optimizer.state[parameter].keys()
        for name, value in optimizer.state[parameter].items():
            assert (described[name].shape, described[name].dtype) == (value.shape, value.dtype)


def test_every_float32_value_is_divided_into_a_bfloat16_value_and_further_bits() -> None:
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    largest = torch.finfo(torch.float32).max
    special = [0.0, -0.0, math.inf, -math.inf, largest, -largest, 1e-45, 1 + 2**-8, -1 - 3 * 2**-8]
    # The last ones are NaN, as GPUs compute it and with all bits.
    of_special = torch.tensor(special).view(torch.int32)
    bits = torch.cat([bits, of_special, torch.tensor([2**31 - 1, -1], dtype=torch.int32)])
    values = bits.view(torch.float32)
    rounded, further_bits = divided(values)
    is_nan = values.isnan()
    found = joined(rounded, further_bits)
    assert torch.equal(found[~is_nan].view(torch.int32), bits[~is_nan])
    assert found[is_nan].isnan().all() and rounded[is_nan].isnan().all()
    is_middle = (bits & 0xFFFF) == 2**15
    is_as_converted = rounded.view(torch.int16) == values.bfloat16().view(torch.int16)
    assert is_as_converted[~is_nan & ~is_middle].all()


@pytest.mark.parametrize("shape", [(64, 256), (300,)], ids=["matrix", "vector"])
def test_bfloat16_weights_with_further_bits_are_updated_as_float32_weights(
    shape: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(shape, generator=generator).bfloat16()
    wide, narrow, rounded = (
        nn.Parameter(start.to(dtype, copy=True))
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    # A rate whose updates are less than half of the distance of two bfloat16 weights.
    options = {"lr": 1e-4, "min_elements": 1024}
    optimizers = [
        AdamW8bit([wide], **options),  # type: ignore[arg-type]
        AdamW8bit([narrow], **options, float32_weights=True),  # type: ignore[arg-type]
        AdamW8bit([rounded], **options),  # type: ignore[arg-type]
    ]
    for _ in range(10):
        gradient = torch.randn(shape, generator=generator).bfloat16()
        for parameter, optimizer in zip((wide, narrow, rounded), optimizers, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    state = optimizers[1].state[narrow]
    assert torch.equal(joined(narrow.detach(), state["further_bits"]), wide.detach())
    for name, value in optimizers[0].state[wide].items():
        assert torch.equal(state[name], value)
    assert torch.equal(narrow.detach(), wide.detach().bfloat16())
    # Without the bits, the updates of large weights are lost.
    is_large = start.abs() > 0.5
    assert torch.equal(rounded.detach()[is_large], start[is_large])
    assert not torch.equal(wide.detach()[is_large], start[is_large].float())


def test_a_transposed_matrix_is_updated_as_its_contiguous_copy() -> None:
    values = torch.randn(512, 256, generator=torch.Generator().manual_seed(5)).bfloat16().t()
    transposed, contiguous = nn.Parameter(values), nn.Parameter(values.contiguous())
    optimizers = [AdamW8bit([each], float32_weights=True) for each in (transposed, contiguous)]
    for _ in range(2):
        gradient = torch.randn(256, 512).bfloat16()
        for parameter, optimizer in zip((transposed, contiguous), optimizers, strict=True):
            parameter.grad = gradient
            optimizer.step()
    assert torch.equal(transposed, contiguous)
    for name, value in optimizers[0].state[transposed].items():
        assert torch.equal(value, optimizers[1].state[contiguous][name])


def test_further_bits_of_float16_weights_are_an_error() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    with pytest.raises(RecipeError, match="float16"):
        AdamW8bit([parameter], float32_weights=True)


def test_a_block_that_is_no_power_of_two_is_an_error() -> None:
    with pytest.raises(RecipeError, match="not a power of two"):
        AdamW8bit([nn.Parameter(torch.zeros(2))], block_size=48)
