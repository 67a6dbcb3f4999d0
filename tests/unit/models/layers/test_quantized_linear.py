"""Linear layers with weights in 4 bits: the values, the gradients, and the layers that are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.models.layers.quantized_linear import (
    QuantizedLinear,
    dequantize,
    num_bytes,
    quantize,
    quantize_layers,
)

CPU = torch.device("cpu")
SHAPES = [(96, 64), (300, 130), (7, 33), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_values_are_near_and_do_not_depend_on_how_rows_are_read(
    kind: Any, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = quantize([weight], kind, CPU)
    assert len(stored) == num_bytes(weight.numel())
    assert torch.equal(quantize(torch.split(weight, 5), kind, CPU), stored)
    found = dequantize(stored, shape, kind, torch.float32)
    # The largest distance of two codes is a third of a block's largest value.
    assert (found - weight).abs().max() < weight.abs().max() / 5
    assert (found - weight).abs().mean() < 0.12


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_bytes_are_those_of_bitsandbytes(kind: Any) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
    stored = quantize([weight], kind, CPU)
    packed, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type=kind)
    assert torch.equal(stored[: packed.numel()], packed.flatten())
    expected = functional.dequantize_4bit(packed, state)
    found = dequantize(stored, (256, 192), kind, torch.float32)
    # Where a scale is between two codes, bitsandbytes may round to the other one.
    assert ((found - expected).abs() > 1e-6).float().mean() < 0.01


def test_a_block_of_zeros_stays_near_zero() -> None:
    weight = torch.zeros(4, 64)
    weight[0] = 1
    found = dequantize(quantize([weight], "nf4", CPU), (4, 64), "nf4", torch.float32)
    assert torch.equal(found[1:], torch.zeros(3, 64))
    assert torch.allclose(found[0], torch.ones(64), atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocasts", [False, True])
def test_a_layer_computes_as_a_linear_one_with_the_dequantized_weight(
    dtype: torch.dtype, autocasts: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8, bias=False)).to(dtype)
    assert quantize_layers(model, "nf4", CPU, excluded=()) == ["0", "1"]
    plain = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8, bias=False)).to(dtype)
    for layer, other in zip(model, plain, strict=True):
        assert isinstance(layer, QuantizedLinear) and isinstance(other, nn.Linear)
        other.weight = nn.Parameter(layer.dequantized(layer.weight, dtype))
        other.bias = layer.bias
    inputs = torch.randn(2, 3, 40, dtype=dtype)
    results = []
    for each in (model, plain):
        given = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            output = each(given)
        output.sum().backward()
        assert given.grad is not None
        results.append((output, given.grad))
    torch.testing.assert_close(results[0], results[1])


def test_layers_are_chosen_by_their_class_and_name() -> None:
    class Router(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "router": Router(8, 8),
            "first": nn.Linear(8, 8),
            "second": nn.Linear(8, 8),
            "part": nn.Sequential(nn.Linear(8, 8)),
            "embedding": nn.Embedding(8, 8),
        }
    )
    first, second = model["first"], model["second"]
    assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    second.weight = first.weight
    assert quantize_layers(model, "fp4", CPU, excluded=["part"]) == ["plain"]
