"""The output layer's product and a distillation loss in one function, computed in chunks of logits.

The loss is cross-entropy with the labels and a divergence from the distributions of a teacher. Neither the student's
nor the teacher's logits of a micro-batch ever exist as a whole: for each chunk of positions, both are computed, then
the losses and the gradients with respect to the student's layer and hidden states, and the chunk is freed. A teacher
that was cached is given by its top-k tokens instead of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_ckpt.models.loss.distillation_targets import (
    Columns,
    DistillationWeights,
    TeacherTargets,
    log_softmax_,
)
from automodel_ckpt.models.loss.fused_cross_entropy import (
    IDENTITY,
    Labeled,
    VocabularyPart,
    in_autocast_dtype,
    loss_in_chunks,
)
from automodel_ckpt.models.loss.head_gradients import ErrorPlace, chunk_rows

_TENSORS_OF_A_CHUNK = 4
"""Tensors of the size of a chunk of logits that are in memory at the same time; the loss of a label alone needs one."""


class Distillation:
    """The loss of a pass through a loss head: cross-entropy with the labels, and a divergence from *targets*."""

    def __init__(self, targets: TeacherTargets, weights: DistillationWeights) -> None:
        self.targets, self.weights = targets, weights
        self.sums: Tensor | None = None
        """The summed cross-entropy and the summed divergence (with its factor temperature**2), [2]; set by a pass."""
        self._labeled: Labeled | None = None

    def __call__(self, labeled: Labeled, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the loss for a layer of *weight* [V, H] and *bias* [V]; 0-dim.

        With ``labeled.part``, these are this rank's rows of the layer, and this is collective.
        """
        hidden, weight, bias = in_autocast_dtype(labeled.hidden, weight, bias)
        # All ranks need the same number of chunks, because each chunk is a collective.
        num_columns = labeled.part.most if labeled.part is not None else weight.shape[0]
        size = rows_of_chunk(hidden.device.type, num_columns)
        self._labeled = labeled
        return loss_in_chunks(hidden, weight, bias, self, size)

    def of_chunk(
        self,
        rows: slice,
        logits: Tensor,
        dtype: torch.dtype,
        place: ErrorPlace | None,
        *,
        with_errors: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute the sums [2] of a chunk, and the gradient of its loss: see ``loss_in_chunks``."""
        del place, with_errors  # errors are not stored, and a part of the divergence
        labeled = self._labeled
        assert labeled is not None
        weights, transform, part = self.weights, labeled.transform, labeled.part
        labels = labeled.labels[rows]
        if labeled.hits is not None:
            labeled.hits.add(logits, labels, part)
        slope: Tensor | float = 1.0
        if transform != IDENTITY:
            logits = transform(logits)
            slope = transform.slope(logits)
        num_columns = self.targets.num_columns
        # None as the end of the slice means all columns.
        student = log_softmax_(logits[:, :num_columns] / weights.temperature, part)
        log_probs = log_softmax_(logits, part)
        where = Columns.of(labels.unsqueeze(1), logits.shape[1], part)
        of_labels = where.read(log_probs)
        if part is not None:
            part.sum(of_labels)
        ce_share = 1 - weights.kd_ratio
        errors = log_probs.exp_().mul_(ce_share)
        where.write(errors, where.read(errors) - ce_share)
        divergence, kd_errors = self.targets.compare(rows.start, student, weights, part)
        factor = weights.kd_ratio * weights.temperature
        # Errors that are not finite would count even with the factor 0.
        if factor:
            errors[:, : kd_errors.shape[1]].add_(kd_errors, alpha=factor)
        if transform != IDENTITY:
            errors.mul_(slope)
        sums = torch.stack([-of_labels.sum(), divergence.sum() * weights.temperature**2])
        return sums, errors.to(dtype)

    def loss_of(self, sums: Tensor) -> Tensor:
        """The loss, 0-dim, of the *sums* [2]. With only one of the two parts, the other does not count even as NaN."""
        self.sums, self._labeled = sums, None
        cross_entropy, divergence = sums.unbind()
        ratio = self.weights.kd_ratio
        if ratio in (0, 1):
            return (divergence if ratio else cross_entropy).clone()
        return (1 - ratio) * cross_entropy + ratio * divergence


def rows_of_chunk(device_type: str, num_columns: int) -> int:
    """The number of positions in a chunk of logits with *num_columns* columns, at least 1."""
    return max(chunk_rows(device_type, num_columns) // _TENSORS_OF_A_CHUNK, 1)


def peak_bytes(num_positions: int, num_columns: int, dtype: torch.dtype, device_type: str) -> int:
    """Bytes that the chunks of :class:`Distillation` need for *num_positions* labels, without its inputs and the
    gradients that it returns."""
    rows = min(num_positions, rows_of_chunk(device_type, num_columns))
    wide = torch.promote_types(dtype, torch.float32)
    bytes_of_tensor = rows * num_columns * wide.itemsize
    return (_TENSORS_OF_A_CHUNK + 1) * bytes_of_tensor


class CapturedHidden:
    """In place of a loss: keeps the hidden states of labeled positions, from which logits are computed later."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        """[N, H], set by a forward pass."""
        self.part: VocabularyPart | None = None
        """This rank's rows of the layer; None: all of them."""

    def __call__(self, labeled: Labeled, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Keep the hidden states and the part; returns 0."""
        self.hidden, self.part = labeled.hidden, labeled.part
        return labeled.hidden.new_zeros((), dtype=torch.float32)
