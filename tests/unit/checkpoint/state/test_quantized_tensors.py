"""Quantized tensors in files: which tensors belong together, and the values of any of their rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.checkpoint.state.quantized_tensors import (
    UnsupportedQuantization,
    dequantized_rows,
    find_quantized,
)
from automodel_ckpt.convert.open import open_weights

FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"block_structure": [16, 16]}}},
}
FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)


def rows_of(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    settings: dict[str, Any],
    first: int,
    stop: int,
) -> torch.Tensor:
    """The dequantized rows of the tensor ``w`` of a model in a file with *tensors*."""
    save_file(tensors, directory / "model.safetensors")
    source = open_weights(directory).modules["model"]
    found = find_quantized(source.tensors, settings)
    assert list(found.tensors) == ["w"]
    assert found.parts == tensors.keys() - {"w"}
    blocks = list(dequantized_rows(source, found.tensors["w"], first, stop))
    assert next(start for start, _ in blocks) == first
    return torch.cat([block for _, block in blocks])


@pytest.mark.parametrize("rows", [(0, 40), (3, 17), (32, 40), (16, 32)])
def test_the_last_block_of_rows_can_be_smaller_than_the_others(
    tmp_path: Path, rows: tuple[int, int]
) -> None:
    # transformers would derive blocks of 40 / 3 rows from the shapes, and raises an error.
    w, scales = fp8(40, 32), torch.rand(3, 2)
    expected = torch.empty(40, 32)
    for row in range(40):
        for column in range(32):
            expected[row, column] = w[row, column].float() * scales[row // 16, column // 16]
    found = rows_of(tmp_path, {"w": w, "w_scale_inv": scales}, FP8, *rows)
    assert torch.equal(found, expected[slice(*rows)])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_is_that_of_the_whole_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    w, scale = fp8(10, 6), torch.full(shape, 0.5)
    tensors = {"w": w, "w_scale": scale, "input_scale": torch.ones(1)}
    assert torch.equal(rows_of(tmp_path, tensors, COMPRESSED, 2, 9), w.float()[2:9] * 0.5)


def test_a_scale_of_each_row_needs_no_stated_block_size(tmp_path: Path) -> None:
    w, scales = fp8(10, 6), torch.rand(10, 1).bfloat16()
    found = rows_of(tmp_path, {"w": w, "w_scale": scales}, COMPRESSED, 2, 9)
    assert torch.equal(found, (w.float() * scales.float())[2:9])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_experts_can_be_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    w, exponents = fp8(3, 16, 32), torch.randint(120, 130, (3, 1, 2), dtype=torch.uint8)
    factors = torch.pow(2.0, exponents.float() - 127).repeat_interleave(16, dim=2)
    tensors = {"w": w, "w_scale_inv": exponents.view(dtype)}
    found = rows_of(tmp_path, tensors, FP8, 1, 3)
    assert torch.equal(found, (w.float() * factors)[1:])


def test_mxfp4_has_two_values_in_a_byte_and_a_transposed_matrix(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (2, 3, 2, 16), dtype=torch.uint8)
    exponents = torch.randint(120, 130, (2, 3, 2), dtype=torch.uint8)
    expected = torch.empty(2, 64, 3)
    for expert in range(2):
        for row in range(3):
            for column in range(64):
                group, position = divmod(column, 32)
                byte = int(blocks[expert, row, group, position // 2])
                bits = byte >> 4 if position % 2 else byte & 15
                value = FLOAT4[bits & 7] * (-1 if bits & 8 else 1)
                scale = 2.0 ** (int(exponents[expert, row, group]) - 127)
                expected[expert, column, row] = value * scale
    tensors = {"w_blocks": blocks, "w_scales": exponents}
    found = rows_of(tmp_path, tensors, {"quant_method": "mxfp4"}, 0, 2)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        ({"w": fp8(32, 32), "w_scale_inv": torch.rand(3, 5)}, FP8),
        ({"w": fp8(32, 32), "w_scale_inv": torch.rand(2, 2)}, FP8 | {"quant_method": "gptq"}),
        ({"w": fp8(32, 32), "w_scale_inv": torch.rand(0, 2)}, {"quant_method": "fp8"}),
        ({"w": fp8(32, 32), "w_scale_inv": torch.ones(2, 2).double()}, FP8),
        ({"w": fp8(32), "w_scale_inv": torch.ones(2)}, FP8),
        ({"w": torch.ones(32, 32), "w_scale_inv": torch.ones(2, 2)}, FP8),
        ({"w": fp8(32, 32)}, FP8),
        ({"w": torch.ones(4, 4, dtype=torch.int8), "w_scale_inv": torch.ones(1)}, FP8),
        ({"w_packed": torch.ones(4, 4, dtype=torch.int32)}, COMPRESSED),
        (
            {
                "w_blocks": torch.ones(2, 3, 2, 8, dtype=torch.uint8),
                "w_scales": torch.ones(2, 3, 2, dtype=torch.uint8),
            },
            {"quant_method": "mxfp4"},
        ),
        ({"w": fp8(4, 4)}, {"quant_method": "fp8", "weight_block_size": "many"}),
        ({"w": fp8(4, 4)}, {"quant_method": "compressed-tensors", "config_groups": {"a": 3}}),
    ],
)
def test_other_shapes_and_dtypes_are_not_taken_for_a_known_format(
    tmp_path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_weights(tmp_path).modules["model"]
    with pytest.raises(UnsupportedQuantization):
        find_quantized(source.tensors, settings)
