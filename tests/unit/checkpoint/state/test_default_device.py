"""A program can select another default device for new tensors (``torch.set_default_device``): files are still read and
written through memory of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.checkpoint.state.quantized_tensors import dequantized_rows, find_quantized
from automodel_ckpt.convert.open import open_weights

CPU = torch.device("cpu")


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """New tensors have no memory, unless a device is given."""
    with torch.device("meta"):
        yield


def on_cpu(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device=CPU).reshape(shape)


@pytest.mark.usefixtures("elsewhere")
def test_quantized_values_are_read(tmp_path: Path) -> None:
    values, scales = on_cpu(32, 32).to(torch.float8_e4m3fn), on_cpu(2, 2)
    blocks = torch.full((1, 3, 2, 16), 0x21, dtype=torch.uint8, device=CPU)
    exponents = torch.full((1, 3, 2), 127, dtype=torch.uint8, device=CPU)
    files = {
        "fp8": {"w": values, "w_scale_inv": scales},
        "mxfp4": {"w_blocks": blocks, "w_scales": exponents},
    }
    settings = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
        "mxfp4": {"quant_method": "mxfp4"},
    }
    found = {}
    for kind, tensors in files.items():
        directory = tmp_path / kind
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
        source = open_weights(directory).modules["model"]
        quantized = find_quantized(source.tensors, settings[kind]).tensors["w"]
        ((_, found[kind]),) = dequantized_rows(source, quantized, 0, quantized.shape[0])
    factors = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(found["fp8"], values.float() * factors)
    pairs = torch.tensor([0.5, 1.0], device=CPU).repeat(32)
    assert torch.equal(found["mxfp4"], pairs[None, :, None].expand(1, 64, 3))
