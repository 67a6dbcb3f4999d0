"""The cross-entropy of each position in place of a sum, for losses that are no sums over positions.

The weight of a position is known only in the backward pass, so the gradients cannot be computed together with the
losses. The logits of each chunk are computed again in that pass, and never exist as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from automodel_ckpt.models.loss.fused_cross_entropy import (
    Labeled,
    LogitTransform,
    VocabularyPart,
    in_autocast_dtype,
    losses_and_errors,
    wide_logits,
)
from automodel_ckpt.models.loss.head_gradients import GradientSums, chunk_rows


def position_losses(labeled: Labeled, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A criterion of the loss head: the cross-entropy [N] of each labeled position, in float32 or float64.

    Hits are not counted. With ``labeled.part``, *weight* and *bias* are this rank's rows, and this is collective.
    """
    hidden, weight, bias = in_autocast_dtype(labeled.hidden, weight, bias)
    return _PositionLosses.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, weight, bias, labeled.labels, labeled.part, labeled.transform
    )


class _PositionLosses(torch.autograd.Function):
    """Keeps its inputs only; the logits of a chunk exist while its losses or its gradients are computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        part: VocabularyPart | None,
        transform: LogitTransform,
    ) -> Tensor:
        ctx.part, ctx.transform = part, transform
        ctx.save_for_backward(hidden, weight, bias, labels)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        for rows in _chunks(hidden, weight, part):
            logits = wide_logits(hidden[rows], weight, bias)
            found, errors = losses_and_errors(
                logits, labels[rows], part, transform, hidden.dtype, with_errors=False
            )
            losses[rows] = found
            # The memory of this chunk becomes the next one's. The errors can be a part of it.
            del logits, errors
        return losses

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        sums = GradientSums(hidden, weight, bias, ctx.needs_input_grad[:3])
        for rows in _chunks(hidden, weight, ctx.part):
            logits = wide_logits(hidden[rows], weight, bias)
            _, errors = losses_and_errors(
                logits, labels[rows], ctx.part, ctx.transform, hidden.dtype, with_errors=True
            )
            # Multiplied in the dtype of the losses and rounded once: a weight in bfloat16 would scale all errors of a
            # row too much. In place, because a chunk of errors can have a gigabyte.
            errors.mul_(weights[rows].unsqueeze(1))
            sums.add(rows.start, hidden[rows], errors)
            del logits, errors
        one = torch.ones((), dtype=weights.dtype, device=weights.device)
        return *sums.scaled(one), None, None, None


def _chunks(hidden: Tensor, weight: Tensor, part: VocabularyPart | None) -> Iterator[slice]:
    """The positions of each chunk of logits; with *part*, the same number of chunks on all ranks."""
    num_columns = part.most if part is not None else weight.shape[0]
    size = chunk_rows(hidden.device.type, num_columns)
    for start in range(0, len(hidden), size):
        yield slice(start, min(start + size, len(hidden)))
