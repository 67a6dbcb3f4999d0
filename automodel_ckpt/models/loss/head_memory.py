"""The memory that ``fused_cross_entropy.linear_cross_entropy`` needs, for a forecast."""

from __future__ import annotations

from typing import NamedTuple

import torch

from automodel_ckpt.models.loss.fused_cross_entropy import chunk_rows
from automodel_ckpt.models.loss.head_gradients import block_columns
from automodel_ckpt.models.loss.loss_inputs import kernel_for


class HeadBytes(NamedTuple):
    """Bytes beside the inputs and the gradients that are returned."""

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
