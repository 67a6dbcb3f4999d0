"""Weights in 4 bits on a GPU: bitsandbytes' kernel dequantizes to the values that a CPU does."""

from typing import Any

import pytest
import torch

from automodel_ckpt.models.layers.quantized_linear import dequantize, quantize
from tests.support.gpu import DEVICE, HAS_GPU, needs_gpu


@needs_gpu
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(512, 1024), (300, 130)])
def test_a_gpu_dequantizes_to_the_values_of_a_cpu(kind: Any, shape: tuple[int, int]) -> None:
    if HAS_GPU:
        pytest.importorskip("bitsandbytes")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    on_cpu = quantize([weight], kind, torch.device("cpu"))
    device = torch.device(DEVICE)
    found = quantize([weight], kind, device)
    assert (found.cpu() != on_cpu).float().mean() < 1e-3
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantize(on_cpu, shape, kind, dtype)
        values = dequantize(on_cpu.to(device), shape, kind, dtype)
        torch.testing.assert_close(values.cpu(), expected)
