"""The memory that ``fused_cross_entropy.linear_cross_entropy`` needs, for a forecast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from automodel_ckpt.models.loss.fused_cross_entropy import chunk_rows
from automodel_ckpt.models.loss.head_gradients import block_columns
from automodel_ckpt.models.loss.loss_inputs import kernel_for


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of one loss: *num_positions* labels, and a layer with a weight [*num_columns*, *hidden_size*].

    *dtype* is the product's. *stores* is the result of ``head_gradients.stores_errors``, and false for other
    losses than the cross-entropy. All results are bytes beside the inputs and the gradients that are returned.
    """

    num_positions: int
    num_columns: int
    hidden_size: int
    dtype: torch.dtype
    device_type: str
    trains_weight: bool
    stores: bool

    @property
    def peak_bytes(self) -> int:
        """The peak: a chunk of logits, and the sum of the weight's gradient or the gradients of all logits."""
        rows = min(
            self.num_positions, chunk_rows(self.device_type, self.num_columns, stores=self.stores)
        )
        logits = rows * self.num_columns * self._wide.itemsize
        if self.stores:
            return self._further_errors + max(logits, self._products)
        if self.dtype != self._wide and kernel_for(self.device_type, self._wide) != "triton":
            # The gradient is a copy of another dtype, and so are the logits of a CPU.
            logits += rows * self.num_columns * self.dtype.itemsize
        total = self._sum
        if total and self.device_type != "cuda":
            # The product of a chunk, before it is added.
            total += self._weight_elements * self.dtype.itemsize
        return logits + total

    @property
    def kept_bytes(self) -> int:
        """What exists from the forward pass until the backward pass has ended."""
        return self._further_errors + self._products if self.stores else self._sum

    @property
    def waiting_bytes(self) -> int:
        """What exists while other losses are computed before the backward pass begins.

        Stored errors count with the memory that becomes the weight's gradient.
        """
        if not self.stores:
            return self._sum
        of_gradient = self._weight_elements * self.dtype.itemsize
        return of_gradient + self._further_errors + self._of_hidden

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def _weight_elements(self) -> int:
        return self.num_columns * self.hidden_size

    @property
    def _sum(self) -> int:
        """The sum of the weight's gradient, if it has another dtype than the weight."""
        is_converted = self.trains_weight and self.dtype != self._wide
        return self._weight_elements * self._wide.itemsize if is_converted else 0

    @property
    def _further_errors(self) -> int:
        """Stored errors that are not in the memory of the weight's gradient."""
        num_further = max(self.num_positions - self.hidden_size, 0)
        return self.num_columns * num_further * self.dtype.itemsize

    @property
    def _of_hidden(self) -> int:
        """The gradient of the hidden states in float32."""
        return 4 * self.num_positions * self.hidden_size

    @property
    def _products(self) -> int:
        """The products of stored errors in float32, after the last chunk: of all hidden states, then of one block."""
        of_block = 4 * block_columns(self.num_columns, self.hidden_size) * self.hidden_size
        return max(self._of_hidden, of_block)
