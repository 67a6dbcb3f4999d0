"""The gradients of the output layer's inputs from the gradients of chunks of logits (called errors), and their memory.

The first functions select what computes a chunk, and its number of rows. :class:`GradientSums` multiplies the errors of
a chunk, and adds the products up in float32. :class:`StoredErrors` keeps the errors of all chunks in 16 bits, and
multiplies them when all are there. The weight's gradient then takes the place of the errors, so that a sum in float32,
which has twice the memory of the gradient, is not needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from automodel_ckpt.base.kernel_trial import has_triton, succeeds

KERNELS = {"cuda": ("triton", "torch"), "cpu": ("torch",)}
"""What computes them, by type of device. The first that is installed is used.

tools/bench/loss_kernels.py compares them on a device.
"""
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""The number of logits in a chunk, by type of device: in float32, 128 MiB on a CPU and 1 GiB on a GPU."""
CHUNK_ELEMENTS_STORED = 2**25
"""The same number on a GPU where the gradients of all logits are kept in 16 bits: 128 MiB more."""
_ROWS = 256
"""On a GPU, the number of rows in a chunk is a multiple of it, so that matrix products divide into full tiles."""
WIDE_PRODUCTS = (torch.bfloat16, torch.float16)
"""Dtypes with matrix products that CUDA can return and accumulate in float32 (``out_dtype``, torch 2.10 and later)."""
BLOCK_ELEMENTS = 2**25
"""The most elements of the weight's gradient that a block of stored errors becomes. They exist in float32, 128 MiB,
until they are rounded. Small models get few blocks: each takes the host the time of two products."""
_STORED_PER_HIDDEN = 2
"""Errors are stored for at most so many positions per element of a hidden state. For more, they would have more memory
than a sum in float32."""
_ALIGNED = 8
"""Elements of 16 bits in the 16 bytes that a GPU reads and writes together."""


def kernel_for(device_type: str, logits_dtype: torch.dtype) -> str:
    """The entry of :data:`KERNELS` that computes losses of chunks: ``triton`` or ``torch``."""
    for name in KERNELS.get(device_type, KERNELS["cpu"]):
        if name != "triton":
            return name
        # The kernels compute in float32.
        if logits_dtype != torch.float32:
            continue
        if device_type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            # The forecast of a GPU elsewhere, by PyTorch for CPUs. PyTorch for CUDA depends on Triton.
            return name
        # Not tried before this process uses a GPU.
        if has_triton() and (not torch.cuda.is_initialized() or try_kernels()):  # type: ignore[no-untyped-call]
            return name
    return "torch"


@functools.cache
def try_kernels() -> bool:
    """Run a kernel once on the GPU. Logs the reason, and returns False, if it fails."""

    def trial() -> None:
        from automodel_ckpt.models.loss import loss_kernels

        logits = torch.zeros(1, 2, device="cuda")
        labels = torch.zeros(1, dtype=torch.int64, device="cuda")
        loss_kernels.losses_and_errors(logits, labels, 1.0, None, torch.float32, True)

    return succeeds(trial, "the loss is computed")


def chunk_rows(device_type: str, num_columns: int, *, stores: bool = False) -> int:
    """The number of rows in a chunk of logits with *num_columns* columns, at least 1.

    *stores*: whether the gradients of all logits are kept.
    """
    elements = CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS["cpu"])
    if stores:
        elements = min(elements, CHUNK_ELEMENTS_STORED)
    if device_type == "cuda":
        if kernel_for(device_type, torch.float32) != "triton":
            # Without the kernel, gradients are a copy of the logits.
            elements //= 2
        return max(elements // num_columns // _ROWS, 1) * _ROWS
    return math.ceil(elements / num_columns)


def stores_errors(
    device_type: str,
    dtype: torch.dtype,
    num_positions: int,
    hidden_size: int,
    *,
    trains_weight: bool,
) -> bool:
    """Whether :class:`StoredErrors` computes the gradients for *num_positions* positions in *dtype*."""
    can_store = device_type == "cuda" and dtype in WIDE_PRODUCTS
    is_smaller = 0 < num_positions <= _STORED_PER_HIDDEN * hidden_size
    return can_store and trains_weight and is_smaller


def block_columns(num_columns: int, hidden_size: int) -> int:
    """The number of columns in a block of stored errors: a power of two, less if the layer has fewer columns."""
    most = max(BLOCK_ELEMENTS // hidden_size, 1)
    return min(1 << (most.bit_length() - 1), num_columns)


@dataclass(frozen=True)
class ErrorBlocks:
    """Errors [rows, columns] in blocks of *width* columns, which follow each other in *memory*.

    A block [rows, width] is contiguous; the last one can be narrower. *memory* [rows * columns] has one dimension.
    """

    memory: Tensor
    rows: int
    columns: int
    width: int

    @property
    def firsts(self) -> range:
        """The first column of each block."""
        return range(0, self.columns, self.width)

    def block(self, first: int) -> Tensor:
        """The block [rows, width] that begins at one of :attr:`firsts`."""
        width = min(self.width, self.columns - first)
        begin = first * self.rows
        return self.memory[begin : begin + self.rows * width].view(self.rows, width)


@dataclass(frozen=True)
class ErrorPlace:
    """Where the errors of a chunk of logits belong: the rows of *blocks* from *start* on."""

    blocks: ErrorBlocks
    start: int

    def put(self, errors: Tensor) -> None:
        """Copy the *errors* [n, columns] of the chunk."""
        for first in self.blocks.firsts:
            block = self.blocks.block(first)
            rows = block[self.start : self.start + len(errors)]
            rows.copy_(errors[:, first : first + block.shape[1]])


class GradientSums:
    """The gradients of the inputs, summed over chunks in at least float32; None for inputs that need none."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: Sequence[bool],
    ) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._num_positions = len(hidden)
        self.factor = weight
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if needed[0]:
            # Not initialized: each row belongs to exactly one chunk, and `add` overwrites it.
            self.hidden = torch.empty_like(hidden)
        if needed[1]:
            # The first product overwrites it; zeros would take 0.5 ms for 2 GB on a GPU.
            new = torch.empty_like if len(hidden) else torch.zeros_like
            self.weight = new(weight, dtype=wide)
        if needed[2] and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=wide)

    def chunks(self, size: int) -> Iterator[tuple[slice, None]]:
        """The positions of each chunk of at most *size*. Errors are added, and not stored."""
        for start in range(0, self._num_positions, size):
            yield slice(start, min(start + size, self._num_positions)), None

    def add(self, start: int, part: Tensor, errors: Tensor) -> None:
        """Add a chunk: *errors* [n, V] are the gradient of its logits, *part* [n, H] its hidden states."""
        if self.hidden is not None:
            rows = self.hidden[start : start + len(part)]
            torch.mm(errors, self.factor, out=rows)
        if self.weight is not None:
            _add_product(self.weight, errors.t(), part, is_first=start == 0)
        if self.bias is not None:
            self.bias += errors.sum(0, dtype=self.bias.dtype)

    def scaled(self, loss_weight: Tensor) -> list[Tensor | None]:
        """The gradients times *loss_weight*, in the dtype of the parameters. Call it once: it changes the sums."""
        scaled: list[Tensor | None] = []
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is None:
                scaled.append(None)
            elif gradient.dtype == loss_weight.dtype:
                scaled.append(_scaled(gradient, loss_weight, self.factor.dtype))
            else:
                # In the weight's dtype: rounded to bfloat16, it would scale all gradients by up to 0.4 % too much.
                product = gradient.to(loss_weight.dtype).mul_(loss_weight)
                scaled.append(product.to(self.factor.dtype))
        return scaled


class StoredErrors:
    """The gradients of the inputs, from the errors of all chunks in the dtype of the weight.

    The errors of the first H positions (H is the size of a hidden state) are where the weight's gradient [V, H] will
    be, and the others in memory that is freed with them. In both, block b of the errors ends where, or after, the rows
    of the gradient end that are computed from it. So these rows can overwrite it, but no later block.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: Sequence[bool],
    ) -> None:
        num_columns, hidden_size = self._shape = weight.shape
        num_first = min(len(hidden), hidden_size)
        num_others = len(hidden) - num_first
        self._needed = needed
        # Aligned, because the base of a product's factor is.
        begin = -(-num_columns * (hidden_size - num_first) // _ALIGNED) * _ALIGNED
        self._memory = weight.new_empty(begin + num_columns * num_first)
        self._width = width = block_columns(num_columns, hidden_size)
        groups = [(0, ErrorBlocks(self._memory[begin:], num_first, num_columns, width))]
        if num_others:
            others = weight.new_empty(num_columns * num_others)
            groups.append((num_first, ErrorBlocks(others, num_others, num_columns, width)))
        self._groups = groups
        self._hidden: Tensor | None = None
        self._bias: Tensor | None = None

    def chunks(self, size: int) -> Iterator[tuple[slice, ErrorPlace]]:
        """The positions of each chunk of at most *size*, and where their errors belong."""
        for first, blocks in self._groups:
            for start in range(0, blocks.rows, size):
                stop = min(start + size, blocks.rows)
                yield slice(first + start, first + stop), ErrorPlace(blocks, start)

    def multiply(self, weight: Tensor) -> None:
        """Compute the gradients of the hidden states and of the bias, after the errors of all chunks are stored.

        The layer's *weight* [V, H] can be freed afterwards, as fsdp2 does between the two passes.
        """
        num_columns, hidden_size = self._shape
        wide = torch.promote_types(weight.dtype, torch.float32)
        if self._needed[0]:
            num_positions = sum(blocks.rows for _, blocks in self._groups)
            self._hidden = _new(num_positions, hidden_size, like=weight, dtype=wide)
        if self._needed[2]:
            self._bias = weight.new_zeros(num_columns, dtype=wide)
        for start, blocks in self._groups:
            for first in blocks.firsts:
                errors = blocks.block(first)
                columns = slice(first, first + errors.shape[1])
                if self._hidden is not None:
                    rows = self._hidden[start : start + blocks.rows]
                    _add_product(rows, errors, weight[columns], is_first=first == 0)
                if self._bias is not None:
                    self._bias[columns] += errors.sum(0, dtype=wide)

    def scaled(self, loss_weight: Tensor, hidden: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients times *loss_weight*, in the dtype of *hidden* [N, H]. Call it once: errors are overwritten."""
        of_hidden = of_bias = None
        if self._hidden is not None:
            of_hidden, self._hidden = _scaled(self._hidden, loss_weight, hidden.dtype), None
        if self._bias is not None:
            of_bias = _scaled(self._bias, loss_weight, hidden.dtype)
        return of_hidden, self._of_weight(loss_weight, hidden), of_bias

    def _of_weight(self, loss_weight: Tensor, hidden: Tensor) -> Tensor:
        num_columns, hidden_size = self._shape
        gradient = self._memory[: num_columns * hidden_size].view(num_columns, hidden_size)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        product = _new(self._width, hidden_size, like=hidden, dtype=wide)
        for first in range(0, num_columns, self._width):
            rows = gradient[first : first + self._width]
            of_block = product[: len(rows)]
            for number, (start, blocks) in enumerate(self._groups):
                part = hidden[start : start + blocks.rows]
                _add_product(of_block, blocks.block(first).t(), part, is_first=number == 0)
            # The errors of this block are multiplied: its rows of the gradient may take their place.
            _scale(of_block, loss_weight, rows)
        # Not a view: autograd adds another gradient of the same weight in place only to a tensor that owns its memory.
        return gradient.detach()


def _new(*shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that a first product overwrites."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _add_product(total: Tensor, first: Tensor, second: Tensor, *, is_first: bool) -> None:
    """Add ``first [m, k] @ second [k, n]`` to *total* [m, n], on a GPU in the dtype of *total*.

    With *is_first*, *total* counts as 0 and is not read.
    """
    is_same = total.dtype == first.dtype
    if is_first and is_same:
        torch.mm(first, second, out=total)
    elif is_same:
        total.addmm_(first, second)
    elif not total.is_cuda:
        product = first @ second
        if is_first:
            total.copy_(product)
        else:
            total += product
    elif is_first:
        torch.mm(first, second, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, first, second, out_dtype=total.dtype, out=total)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """*gradient* times *factor* in *dtype*; in one pass over the memory on a GPU. Can change *gradient*."""
    if gradient.dtype == dtype or not gradient.is_cuda:
        return gradient.mul_(factor).to(dtype)
    scaled = torch.empty_like(gradient, dtype=dtype)
    _scale(gradient, factor, scaled)
    return scaled


def _scale(values: Tensor, factor: Tensor, scaled: Tensor) -> None:
    """Write *values* times *factor*, 0-dim, to *scaled*, which may have a narrower dtype."""
    is_plain = values.is_contiguous() and scaled.is_contiguous()
    if is_plain and kernel_for(values.device.type, values.dtype) == "triton":
        from automodel_ckpt.models.loss import loss_kernels

        loss_kernels.scale(values, factor, scaled)
        return
    torch.mul(values, factor, out=scaled)


class HeadBytes(NamedTuple):
    """Bytes in addition to the inputs and the returned gradients."""

    peak: int
    """A chunk of logits, and the sum of the weight's gradient or the gradients of all logits."""
    kept: int
    """What exists from the forward pass until the backward pass has ended."""
    waiting: int
    """What exists while other losses are computed before the backward pass begins. Stored errors count with the memory
    that becomes the weight's gradient."""


def head_bytes(
    num_positions: int,
    num_columns: int,
    hidden_size: int,
    dtype: torch.dtype,
    device_type: str,
    *,
    trains_weight: bool,
    stores: bool,
) -> HeadBytes:
    """The memory of one loss of *num_positions* labels, and a layer with a weight [*num_columns*, *hidden_size*].

    *dtype* is the product's. *stores* is the result of ``head_gradients.stores_errors``, and false for other losses
    than the cross-entropy.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rows = min(num_positions, chunk_rows(device_type, num_columns, stores=stores))
    logits = rows * num_columns * wide.itemsize
    of_weight = num_columns * hidden_size
    if stores:
        # Those that are not in the memory of the weight's gradient.
        further_errors = num_columns * max(num_positions - hidden_size, 0) * dtype.itemsize
        of_hidden = 4 * num_positions * hidden_size
        # In float32, after the last chunk: of all hidden states, then of one block.
        products = max(of_hidden, 4 * block_columns(num_columns, hidden_size) * hidden_size)
        return HeadBytes(
            further_errors + max(logits, products),
            further_errors + products,
            of_weight * dtype.itemsize + further_errors + of_hidden,
        )
    if dtype == wide:
        return HeadBytes(logits, 0, 0)
    if kernel_for(device_type, wide) != "triton":
        # The gradient is a copy of another dtype, and so are the logits of a CPU.
        logits += rows * num_columns * dtype.itemsize
    # The sum of the weight's gradient, and on a CPU the product of a chunk, before it is added.
    of_sum = of_weight * wide.itemsize if trains_weight else 0
    product = of_weight * dtype.itemsize if trains_weight and device_type != "cuda" else 0
    return HeadBytes(logits + of_sum + product, of_sum, of_sum)
