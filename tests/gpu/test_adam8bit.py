"""8-bit moments, and bfloat16 weights with further bits, on a GPU: the compiled update beside that of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel_ckpt.training.adam8bit import AdamW8bit, joined
from tests.support.gpu import DEVICE, needs_gpu

RATE = 1e-3
NUM_STEPS = 5


def after_steps(
    device: torch.device | str, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter [...] of *dtype* and its float32 weights after some steps, on the CPU."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(shape, generator=generator).bfloat16()
    parameter = nn.Parameter(start.to(device, dtype))
    optimizer = AdamW8bit([parameter], lr=RATE, min_elements=1024, float32_weights=True)
    for _ in range(NUM_STEPS):
        gradient = torch.randn(shape, generator=generator).bfloat16()
        parameter.grad = gradient.to(device, dtype)
        optimizer.step()
    values, bits = parameter.detach().cpu(), optimizer.state[parameter].get("further_bits")
    return values, values if bits is None else joined(values, bits.cpu())


@needs_gpu
@pytest.mark.parametrize("shape", [(48, 1024), (300,)], ids=["matrix", "vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weights_are_those_of_the_cpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _, expected = after_steps("cpu", dtype, shape)
    values, found = after_steps(DEVICE, dtype, shape)
    # A moment between two codes can get the other one, and its weight a part of an update.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2 * RATE)
    assert (found - expected).abs().mean() < 0.002 * RATE
    # The middle between two bfloat16 values is rounded away from 0.
    is_rounded = values == found.to(dtype)
    assert is_rounded.float().mean() > 0.999
