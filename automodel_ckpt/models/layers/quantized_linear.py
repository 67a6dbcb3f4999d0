"""Frozen linear layers with weights in 4 bits (QLoRA), each in one tensor of bytes that is sharded like any other.

The values are bitsandbytes' with double quantization, so that a base that transformers quantizes is the same.
A block of 64 values has a scale, and 256 scales have one. fsdp2 divides the bytes anywhere and gathers them before they
are used, so that the blocks do not depend on the number of ranks.
Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from automodel_ckpt.base.code_tables import dynamic_table, nearest
from automodel_ckpt.models.meta_init import put

Kind = Literal["nf4", "fp4"]
_BLOCK, _GROUP = 64, 256
"""The values with one scale, and the scales with one."""
_PIECE = _BLOCK << 14
"""The values that are quantized or dequantized at one time. Temporary tensors of them take some 10 bytes of a value."""
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (appendix E of the source)."""
_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3)
"""Multiples of a twelfth by the last three bits of a code. The first bit is the sign."""


class QuantizedLinear(nn.Linear):
    """A linear layer with a *weight* of bytes, which the forward and the backward pass dequantize.

    It computes in the type of its inputs, under autocast in autocast's.
    """

    kind: Kind
    quantizes_on: torch.device

    def forward(self, inputs: Tensor) -> Tensor:
        device_type = inputs.device.type
        if torch.is_autocast_enabled(device_type):
            inputs = inputs.to(torch.get_autocast_dtype(device_type))
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        return _Product.apply(inputs, self.weight, bias, self)  # type: ignore[no-any-return, no-untyped-call]

    def dequantized(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of the bytes *stored*, which are complete."""
        return dequantize(stored, (self.out_features, self.in_features), self.kind, dtype)

    @property
    def num_uncounted(self) -> int:
        """The number of values that its bytes are not."""
        return self.out_features * self.in_features - self.weight.numel()

    def fill_weight(self, rows: Iterable[Tensor]) -> None:
        """Quantize a weight that is given as blocks of its *rows*, and keep this rank's shard of it."""
        put(self.weight, quantize(rows, self.kind, self.quantizes_on))


class _Product(torch.autograd.Function):
    """``x W' + b``. The backward pass dequantizes W again, so that it needs no memory between the passes."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, stored: Tensor, bias: Tensor | None, layer: QuantizedLinear
    ) -> Tensor:
        ctx.save_for_backward(stored)
        ctx.layer = layer
        return F.linear(inputs, layer.dequantized(stored, inputs.dtype), bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (stored,) = ctx.saved_tensors
        of_inputs = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = gradient @ ctx.layer.dequantized(stored, gradient.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_inputs, None, of_bias, None


def quantize_layers(
    model: nn.Module, kind: Kind, device: torch.device, *, excluded: Collection[str]
) -> list[str]:
    """Let the linear layers of *model* have frozen weights in 4 bits, and return their names.

    Layers in the modules *excluded* stay, and those with a weight that is not theirs alone. The modules stay the same
    objects. Weights are quantized on *device*: now, or on the meta device by :meth:`QuantizedLinear.fill_weight`.
    """
    owners = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    prefixes = tuple(f"{name}." for name in excluded)
    found: list[str] = []
    for name, module in model.named_modules():
        # Classes of the model's code may compute something else, such as routers.
        if type(module) is not nn.Linear or f"{name}.".startswith(prefixes):
            continue
        if owners[id(module.weight)] > 1:
            continue
        found.append(name)
        _quantize_layer(module, kind, device)
    return found


def _quantize_layer(layer: nn.Linear, kind: Kind, device: torch.device) -> None:
    weight = layer.weight.detach()
    stored = torch.empty(num_bytes(weight.numel()), dtype=torch.uint8, device=weight.device)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    layer.__class__ = QuantizedLinear
    assert isinstance(layer, QuantizedLinear)
    layer.kind, layer.quantizes_on = kind, device
    if not weight.is_meta:
        layer.fill_weight([weight])


def num_bytes(num_values: int) -> int:
    """The bytes of a weight with *num_values* values."""
    return sum(_parts(num_values))


def _parts(num_values: int) -> list[int]:
    """The bytes of the codes of a weight, of its statistics (the mean scale, and the scales of scales), and of the
    codes of its scales. The first is a multiple of 32, so that the second is aligned."""
    num_blocks = -(-num_values // _BLOCK)
    return [num_blocks * _BLOCK // 2, 4 * (1 + -(-num_blocks // _GROUP)), num_blocks]


@torch.no_grad()
def quantize(rows: Iterable[Tensor], kind: Kind, device: torch.device) -> Tensor:
    """The bytes of a weight that is given as blocks of its *rows*, on *device*."""
    packed: list[Tensor] = []
    of_blocks: list[Tensor] = []
    table = _table(kind, device)
    order = table.argsort()
    for values in _pieces(rows, device):
        codes, scales = _nearest(values.view(-1, _BLOCK), table[order])
        codes = order[codes].to(torch.uint8)
        packed.append((codes[:, ::2] << 4 | codes[:, 1::2]).flatten())
        of_blocks.append(scales)
    scales = torch.cat(of_blocks)
    # In float32, a sum depends on the number of threads.
    mean = scales.double().mean().float()
    groups = F.pad(scales - mean, (0, -len(scales) % _GROUP)).view(-1, _GROUP)
    codes, of_groups = _nearest(groups, _dynamic(device))
    statistics = torch.cat([mean.view(1), of_groups]).view(torch.uint8)
    return torch.cat([*packed, statistics, codes.to(torch.uint8).flatten()[: len(scales)]])


def _pieces(rows: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The values of *rows* in float32, in pieces of whole blocks. The last block is filled with zeros."""
    rest = torch.empty(0, device=device)
    for block in rows:
        values = torch.cat([rest, block.to(device, torch.float32).flatten()])
        num_whole = len(values) // _BLOCK * _BLOCK
        yield from torch.split(values[:num_whole], _PIECE)
        rest = values[num_whole:]
    if len(rest):
        yield F.pad(rest, (0, _BLOCK - len(rest)))


def _nearest(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of the sorted *table* for *values* [n, block], in int32, and the scales of the blocks [n]."""
    scales = values.abs().amax(1, keepdim=True)
    # A block of zeros has no scale.
    scaled = values * (1 / scales.clamp(min=torch.finfo(torch.float32).tiny))
    return nearest(scaled, table), scales.flatten()


def dequantize(stored: Tensor, shape: tuple[int, int], kind: Kind, dtype: torch.dtype) -> Tensor:
    """The weight with the bytes *stored*, which :func:`quantize` has made, in *dtype*."""
    weight: Tensor = _dequantize(stored, list(shape), kind, dtype)
    return weight


# An operation that torch.compile does not look into.
@torch.library.custom_op(
    "automodel_ckpt::dequantize_4_bits",
    mutates_args=(),
    schema="(Tensor stored, int[] shape, str kind, ScalarType dtype) -> Tensor",
)
def _dequantize(stored: Tensor, shape: list[int], kind: Kind, dtype: torch.dtype) -> Tensor:
    packed, statistics, codes = torch.split(stored, _parts(shape[0] * shape[1]))
    mean, of_groups = statistics.view(torch.float32).tensor_split([1])
    scales = of_groups.repeat_interleave(_GROUP, output_size=len(of_groups) * _GROUP)
    scales = scales[: len(codes)] * _dynamic(stored.device)[codes.int()] + mean
    if stored.device.type == "cuda":
        # It reads and writes once what takes several operations of torch.
        from bitsandbytes.functional import dequantize_4bit

        weight = torch.empty(shape, dtype=dtype, device=stored.device)
        dequantize_4bit(packed, absmax=scales, out=weight, blocksize=_BLOCK, quant_type=kind)
        return weight
    weight = torch.empty(len(scales), _BLOCK, dtype=dtype, device=stored.device)
    # The piece of each: one of bytes, and one of blocks.
    sizes = ((packed, _PIECE // 2), (scales, _PIECE // _BLOCK), (weight, _PIECE // _BLOCK))
    for pairs, factors, target in zip(*(torch.split(*each) for each in sizes), strict=True):
        values = _pairs(kind, stored.device)[pairs.int()].view(-1, _BLOCK)
        target.copy_(values * factors[:, None])
    return weight.flatten()[: shape[0] * shape[1]].view(shape)


@_dequantize.register_fake
def _(stored: Tensor, shape: list[int], kind: Kind, dtype: torch.dtype) -> Tensor:
    return stored.new_empty(shape, dtype=dtype)


@functools.cache
def _table(kind: Kind, device: torch.device) -> Tensor:
    """The values of the 16 codes of *kind*."""
    values = _NF4 if kind == "nf4" else [sign * each / 12 for sign in (1, -1) for each in _FP4]
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def _pairs(kind: Kind, device: torch.device) -> Tensor:
    """The two values of each byte, as [256, 2]."""
    table = _table(kind, device)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)


@functools.cache
def _dynamic(device: torch.device) -> Tensor:
    """The values of the codes of scales."""
    return dynamic_table(is_signed=True).to(device)
