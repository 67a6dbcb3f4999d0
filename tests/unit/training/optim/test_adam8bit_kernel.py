"""The Triton kernel of AdamW with 8-bit moments, beside torch's operations.

On a CPU, it runs in Triton's interpreter (`make kernels`)."""

import functools
import os
from typing import Any

import pytest
import torch

from automodel_ckpt.base.code_tables import dynamic_table, nearest
from automodel_ckpt.optim import adam8bit
from automodel_ckpt.optim.adam8bit import update_blocks

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)

TABLES = [dynamic_table(is_signed) for is_signed in (True, False)]
ULP = 2.0**-23
GROUP: dict[str, Any] = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-4, "weight_decay": 0.3}
SETTINGS = adam8bit._setting_values(GROUP, 3.0)
"""All differ, and change what they are about."""
Rows = list[torch.Tensor]
"""Weights, gradients, codes and scales of both moments."""


def made(
    num_rows: int,
    block: int,
    dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
) -> Rows:
    """Random rows of several sizes, whose moments are what a step has left."""
    generator = torch.Generator().manual_seed(num_rows * block)
    sizes = torch.logspace(-3, 2, num_rows).unsqueeze(1)
    numbers = [torch.randn(num_rows, block, generator=generator) * sizes for _ in range(4)]
    numbers[3] = numbers[3].square()
    scales = [moment.abs().amax(1, keepdim=True) for moment in numbers[2:]]
    codes = [
        nearest(moment / scale, table).byte()
        for moment, scale, table in zip(numbers[2:], scales, TABLES, strict=True)
    ]
    return [numbers[0].to(dtype), numbers[1].to(gradient_dtype), *codes, *scales]


def updated(rows: Rows, settings: list[float], bits: torch.Tensor | None = None) -> Rows:
    """Copies of *rows*, and of further bits, after the kernel's update."""
    from automodel_ckpt.optim import adam8bit_kernel

    copies = [each.to(DEVICE, copy=True) for each in rows]
    copy_of_bits = None if bits is None else bits.to(DEVICE, copy=True)
    assert adam8bit_kernel.fits(*copies[:2])
    adam8bit_kernel.update(copies, settings, copy_of_bits)
    return [each.cpu() for each in copies + ([] if copy_of_bits is None else [copy_of_bits])]


def expected_of(rows: Rows, settings: list[float], bits: torch.Tensor | None = None) -> Rows:
    """Copies of *rows*, and of further bits, after the update of torch's operations on the CPU."""
    copies = [each.clone() for each in rows]
    copy_of_bits = None if bits is None else bits.clone()
    update_blocks(copies, TABLES, torch.tensor(settings), copy_of_bits)
    return copies + ([] if copy_of_bits is None else [copy_of_bits])


@functools.cache
def is_exact() -> bool:
    """Whether torch.lerp on this CPU rounds a product and a sum together, as the kernel does, and no others are."""
    start, end = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor(SETTINGS[0])
    together = start.double() + (end - start).double() * weight.double()
    return INTERPRETED and torch.equal(torch.lerp(start, end, weight), together.float())


def weights_of(rows: Rows) -> torch.Tensor:
    """The weights in float64, with their further bits if there are any."""
    return (adam8bit.joined(rows[0], rows[6]) if len(rows) > 6 else rows[0]).double()


def assert_updated(rows: Rows, found: Rows, expected: Rows) -> None:
    """Check weights, codes and scales. Moments differ in the last bit where sums and products are rounded otherwise."""
    for each, other in zip(found, expected, strict=True):
        assert each.dtype == other.dtype and each.shape == other.shape
    for each, other in zip(found[4:6], expected[4:6], strict=True):
        torch.testing.assert_close(each, other, rtol=0 if is_exact() else 4 * ULP, atol=0)
    for each, other in zip(found[2:4], expected[2:4], strict=True):
        distances = (each.int() - other.int()).abs()
        assert distances.max() <= (0 if is_exact() else 1)
        assert distances.float().mean() <= 1e-3
    before, after, exactly = (weights_of(each) for each in (rows, found, expected))
    step = ULP if len(found) > 6 else torch.finfo(found[0].dtype).eps
    largest = torch.maximum(exactly.abs(), before.abs())
    # The interpreter cuts digits of 16 bits off instead of rounding.
    limit = 8 * ULP * (exactly - before).abs() + 1.5 * step * largest
    assert ((after - exactly).abs() <= limit).all()
    # Most weights change by more than that.
    assert ((exactly - before).abs() > 2 * limit).float().mean() > 0.5


@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 2048, 8192])
def test_rows_are_updated_as_by_torch(block: int) -> None:
    rows = made(2 * max(1024 // block, 1) + 1, block)
    assert_updated(rows, updated(rows, SETTINGS), expected_of(rows, SETTINGS))


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_and_gradients_have_any_type(
    dtype: torch.dtype, gradient_dtype: torch.dtype
) -> None:
    rows = made(6, 256, dtype, gradient_dtype)
    assert_updated(rows, updated(rows, SETTINGS), expected_of(rows, SETTINGS))


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_further_bits_are_updated(gradient_dtype: torch.dtype) -> None:
    rows = made(6, 256, gradient_dtype=gradient_dtype)
    rows[0], bits = adam8bit.divided(rows[0])
    found, expected = (each(rows, SETTINGS, bits) for each in (updated, expected_of))
    assert_updated([*rows, bits], found, expected)
