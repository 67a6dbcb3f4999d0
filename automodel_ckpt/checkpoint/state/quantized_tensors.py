"""Tensors that files store quantized, with separate scales: FP8 and MXFP4. They are dequantized while they are read.

Formats, with their sources:

* ``fp8`` (files of DeepSeek-V3; transformers 5.23, ``Fp8Dequantize``): ``NAME`` in float8, and ``NAME_scale_inv`` with
  one scale for each block of rows and columns, or one for the tensor. The value is weight * scale.
* ``compressed-tensors`` with the format ``float-quantized``: ``NAME`` in float8 and ``NAME_scale``: one scale for the
  tensor, for each row, or for each block.
* ``mxfp4`` (gpt-oss; OCP Microscaling Formats 1.0): ``NAME_blocks`` of shape [experts, rows, groups, 16] with two 4-bit
  floats (E2M1) in each byte, the lower bits first, and ``NAME_scales`` of shape [experts, rows, groups], exponents with
  the bias 127. The tensor NAME has the shape [experts, 32 * groups, rows].
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Values
from automodel_ckpt.checkpoint.formats.reading import read_box
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, TensorMap
from automodel_ckpt.checkpoint.sources.source import Tensors

_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALE_TYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "U8"})
_SUFFIXES = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}
_OF_ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "k_scale", "v_scale")
"""Scales of activations, which a model that computes in ordinary floats does not need."""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES_OF_GROUP = 16
_EXPONENT_BIAS = 127
_BLOCK_ELEMENTS = 4 << 20
"""Elements that are dequantized together: 16 MB in float32, and some temporary copies."""


class UnsupportedQuantization(Exception):
    """The reason why quantized files cannot be read here."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor of shape *shape* when it is dequantized, and the names of its two tensors in files.

    *block* is the number of rows and columns that share a scale; unused for mxfp4.
    """

    kind: Literal["float8", "mxfp4"]
    shape: Shape
    values: str
    scales: str
    block: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class QuantizedFiles:
    """The quantized tensors of a model by their names, and the stored tensors that are not separate tensors of it."""

    tensors: Mapping[str, QuantizedTensor]
    parts: frozenset[str]


def find_quantized(tensors: TensorMap, settings: Values) -> QuantizedFiles:
    """Find the quantized ones among the stored *tensors* of a model; *settings* is its ``quantization_config``.

    Only names, dtypes and shapes are read. Raises :class:`UnsupportedQuantization` for another format, and for tensors
    that do not fit together.
    """
    method = str(settings.get("quant_method"))
    if method == "mxfp4":
        found = dict(_mxfp4(tensors))
    elif method in _SUFFIXES:
        found = dict(_float8(tensors, _SUFFIXES[method], _block_size(settings)))
    else:
        raise UnsupportedQuantization(f"it is quantized ({method})")
    parts = set()
    for name, quantized in found.items():
        parts |= {quantized.values, quantized.scales} - {name}
    parts |= {name for name in tensors if name.rpartition(".")[2] in _OF_ACTIVATIONS}
    for name, tensor in tensors.items():
        is_float = tensor.dtype in ORDINARY_FLOATS
        if not is_float and name not in found and name not in parts:
            raise UnsupportedQuantization(f"it is quantized ({name} in {tensor.dtype})")
    return QuantizedFiles(found, frozenset(parts))


def _block_size(settings: Values) -> tuple[int, int] | None:
    """The rows and columns of a block that a ``quantization_config`` states. Returns None when it states none."""
    size = settings.get("weight_block_size")
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        if size is None:
            (group,) = settings["config_groups"].values()
            size = group["weights"]["block_structure"]
        rows, columns = map(operator.index, size)
        if rows > 0 and columns > 0:
            return rows, columns
    return None


def _float8(
    tensors: TensorMap, suffix: str, block: tuple[int, int] | None
) -> Iterator[tuple[str, QuantizedTensor]]:
    for name, values in tensors.items():
        scales = tensors.get(name + suffix)
        if scales is None:
            continue
        is_expected = values.dtype in _FLOAT8 and scales.dtype in _SCALE_TYPES
        if not is_expected or len(values.shape) < 2:
            form = f"{values.dtype} of shape {values.shape} with scales in {scales.dtype}"
            raise UnsupportedQuantization(f"it is quantized ({name} in {form})")
        size = _block_of(name, values.shape, scales.shape, block)
        yield name, QuantizedTensor("float8", values.shape, name, name + suffix, size)


def _block_of(
    name: str, shape: Sequence[int], scales: Sequence[int], stated: tuple[int, int] | None
) -> tuple[int, int]:
    """The rows and columns that share a scale, by the shapes of a tensor and of its scales.

    The *stated* size takes precedence: the last block of a dimension can be smaller than the others.
    """
    rows, columns = shape[-2:]
    if math.prod(scales) == 1:
        return max(rows, 1), max(columns, 1)
    has_grid = len(scales) == len(shape) and tuple(scales[:-2]) == tuple(shape[:-2])
    if has_grid and stated is not None:
        num_rows = math.ceil(rows / stated[0])
        num_columns = math.ceil(columns / stated[1])
        if tuple(scales[-2:]) == (num_rows, num_columns):
            return stated
    if has_grid:
        num_rows, num_columns = scales[-2:]
        is_divisor = num_rows > 0 and rows % num_rows == 0
        if is_divisor and num_columns > 0 and columns % num_columns == 0:
            return rows // num_rows, columns // num_columns
    raise UnsupportedQuantization(f"{name} of shape {tuple(shape)} has scales of {tuple(scales)}")


def _mxfp4(tensors: TensorMap) -> Iterator[tuple[str, QuantizedTensor]]:
    for blocks_name, blocks in tensors.items():
        name = blocks_name.removesuffix("_blocks")
        scales = tensors.get(f"{name}_scales")
        if name == blocks_name or scales is None:
            continue
        is_expected = (
            (blocks.dtype, scales.dtype) == ("U8", "U8")
            and len(blocks.shape) == 4
            and blocks.shape[:-1] == scales.shape
            and blocks.shape[-1] == _BYTES_OF_GROUP
        )
        if not is_expected:
            shapes = f"{blocks.shape} with scales of {scales.shape}"
            raise UnsupportedQuantization(f"it is quantized ({name}: blocks of shape {shapes})")
        experts, rows, groups = scales.shape
        shape = (experts, 2 * _BYTES_OF_GROUP * groups, rows)
        yield name, QuantizedTensor("mxfp4", shape, blocks_name, f"{name}_scales")


def dequantized_rows(
    source: Tensors, quantized: QuantizedTensor, first: int, stop: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (number of the first row, rows in float32) of the dequantized tensor, in blocks from row *first* to *stop*.

    A row is an index of the first dimension. Only the bytes of these rows are read. Raises :class:`CheckpointUnusable`
    naming the file.
    """
    compute = _mxfp4_rows if quantized.kind == "mxfp4" else _float8_rows
    elements_of_row = max(1, math.prod(quantized.shape[1:]))
    num_rows = max(1, _BLOCK_ELEMENTS // elements_of_row)
    for start in range(first, stop, num_rows):
        yield start, compute(source, quantized, start, min(start + num_rows, stop))


def _float8_rows(
    source: Tensors, quantized: QuantizedTensor, first: int, stop: int
) -> torch.Tensor:
    stored = source.tensors[quantized.values]
    scales = source.tensors[quantized.scales]
    values = read_rows(source, stored, first, stop).float()
    if math.prod(scales.shape) == 1:
        return values * _as_factors(read_box(source.root, scales, scales.box)).reshape(())
    block_rows, block_columns = quantized.block
    if len(quantized.shape) > 2:
        factors = _as_factors(read_rows(source, scales, first, stop))
        rows = torch.arange(quantized.shape[-2], device="cpu") // block_rows
    else:
        # The scales of the blocks that the rows are in, from the first to the last.
        first_block = first // block_rows
        last_block = (stop - 1) // block_rows
        factors = _as_factors(read_rows(source, scales, first_block, last_block + 1))
        rows = torch.arange(first, stop, device="cpu") // block_rows - first_block
    columns = torch.arange(quantized.shape[-1], device="cpu") // block_columns
    return values * factors.index_select(-2, rows).index_select(-1, columns)


def _as_factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are exponents."""
    if scales.dtype == torch.uint8:
        return (scales.float() - _EXPONENT_BIAS).exp2()
    return scales.float()


def _mxfp4_rows(source: Tensors, quantized: QuantizedTensor, first: int, stop: int) -> torch.Tensor:
    blocks = read_rows(source, source.tensors[quantized.values], first, stop)
    scales = read_rows(source, source.tensors[quantized.scales], first, stop)
    positive = torch.tensor(_FP4_VALUES, device="cpu")
    table = torch.cat([positive, -positive])
    pairs = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], dim=-1)
    # In each group, the values of the 16 bytes follow each other.
    values = pairs.flatten(-2) * _as_factors(scales)[..., None]
    return values.flatten(-2).transpose(1, 2)


def read_rows(source: Tensors, stored: Tensor, first: int, stop: int) -> torch.Tensor:
    """Read rows ``first .. stop`` of a stored tensor, in its dtype, into host memory.

    Raises :class:`CheckpointUnusable` naming the file.
    """
    rest = stored.shape[1:]
    return read_box(source.root, stored, Box((first, *(0,) * len(rest)), (stop - first, *rest)))
