"""Next-token loss as a sum over label tokens, so that the mean over a global batch does not depend on its division.

The weight of a rank's loss depends on the label tokens of all ranks and micro-batches. So losses are sums here, and the
caller divides once by the global count.

Multi-token prediction adds losses of further tokens. Depth k (from 1) predicts at position i the label of position
i + 1 + k, if both positions are in the same sample: it does not predict across samples that share a row. The loss of a
depth is the sum of its cross-entropies. The loss of a micro-batch is the mean over the depths. The caller divides it by
the label tokens of the global batch, as the main loss. Fewer labels are predicted at a greater depth; the divisor stays
the same, as in NeMo AutoModel and Megatron-LM.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_ckpt.base.labels import IGNORE_INDEX as IGNORE_INDEX
from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.errors import RecipeError

_NUM_TRIED = 16
_MEAN_TOLERANCE = 0.02
"""The relative difference by which two equal means in bfloat16 may differ; a sum doubles."""
WHOLE = slice(None)
"""All positions of a row."""

LossFn = Callable[[Tensor, Tensor], Tensor]
"""``loss_fn(logits [N, V], labels [N])`` -> 0-dim *sum* over the positions with another label than -100.

The tensors are shifted (position i predicts label i), flattened over the batch, and in the model's dtype. A
``loss_fn: {_target_: ...}`` section names one or its builder; ``reduction="sum"`` is supplied where the callable has
that parameter (so ``torch.nn.CrossEntropyLoss`` works as it is).
"""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [N, V] and labels [N], summed over labels other than -100; 0-dim.

    It is computed in float32, or in float64 where the logits are.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def shift_labels(labels: Tensor) -> Tensor:
    """Labels [B, T] moved one to the left, so that position i holds the token it has to predict; the last is -100."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def labelled_positions(
    labels: Tensor, part: slice = WHOLE, *, all_up_to: int = 0
) -> tuple[Tensor | None, Tensor]:
    """Find the positions that predict a label, from unshifted labels [B, T].

    Returns (positions [N] in the flattened batch, their labels [N]), both on the CPU. With *part*, only that slice of
    each row is used, and positions count in the flattened batch of slices. If there are at most *all_up_to* positions,
    returns (None, labels of all positions), with -100 at positions without a label.
    """
    # numpy is three times as fast as torch for tensors of this size.
    rows = in_numpy(labels)
    # Shifted before *part* is taken: the last position of a slice predicts the first token of the
    # next slice, which another rank has.
    shifted = np.full_like(rows, IGNORE_INDEX)
    shifted[:, :-1] = rows[:, 1:]
    flat = shifted[:, part].reshape(-1)
    if flat.size <= all_up_to:
        return None, torch.from_numpy(flat)
    positions = np.flatnonzero(flat != IGNORE_INDEX)
    return torch.from_numpy(positions), torch.from_numpy(flat[positions])


def in_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor of a batch as an array, which shares the tensor's memory if possible."""
    # force copies from other devices and drops gradients, but takes five times as long.
    needs_force = not tensor.is_cpu or tensor.requires_grad
    return tensor.numpy(force=needs_force)


def num_label_tokens(labels: Tensor) -> int:
    """The number of predicted labels in [B, T]: all except -100 and the first of each row, which nothing precedes."""
    return int(np.count_nonzero(in_numpy(labels)[:, 1:] != IGNORE_INDEX))


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    loss_fn: LossFn = cross_entropy_sum,
    part: slice = WHOLE,
) -> Tensor:
    """The sum of *loss_fn* over a micro-batch, 0-dim.

    *labels* [B, T] are unshifted. *logits* are [B, T, V], or the logits of a *part* of each row, on the same device.
    Raises :class:`RecipeError` for logits or losses of another shape.
    """
    _require_logits(logits, labels[:, part])
    loss = loss_fn(logits.flatten(0, 1), shift_labels(labels)[:, part].flatten())
    check_scalar(
        loss, "loss_fn", "return the sum of the values that loss_fn computes for each position"
    )
    return loss


def check_scalar(loss: object, where: str, hint: str) -> None:
    """Raise :class:`RecipeError` if the *loss* that user code computed is no tensor with a single value."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return
    found = f"{loss!r:.80}"
    if isinstance(loss, Tensor):
        found = f"a tensor of shape {list(loss.shape)}"
    raise RecipeError(
        "the loss must be a scalar tensor, the sum over all positions",
        where=where,
        value=found,
        hint=hint,
    )


def _require_logits(logits: object, labels: Tensor) -> None:
    found = type(logits).__name__
    if isinstance(logits, Tensor):
        if logits.dim() == 3 and logits.shape[:2] == labels.shape:
            return
        found = f"a tensor of shape {list(logits.shape)} for {list(labels.shape)} tokens"
    raise RecipeError(
        "the model returns no logits for each token, which the next-token loss requires",
        where="model",
        value=found,
        hint="use a causal language model (transformers' AutoModelForCausalLM), let yours return logits [B, T, V], "
        "or compute another loss in a recipe of your own (Objective.loss)",
    )


def check_is_sum(loss_fn: LossFn, logits: Tensor, labels: Tensor) -> bool:
    """Validate that *loss_fn* is a sum: compute it for a few positions, and for each of them twice.

    *logits* [N, V] and *labels* [N] are arguments of a :data:`LossFn`. Returns False if other labels have to be tried,
    because there are none here, or the loss is not finite. Raises :class:`RecipeError` for a mean, which does not
    change. The random generators do not change either, nor does the state of an object *loss_fn*. The state of a
    closure does change.
    """
    positions = (labels != IGNORE_INDEX).nonzero().flatten()[:_NUM_TRIED]
    if not len(positions):
        return False
    logits, labels = logits.detach()[positions], labels[positions]
    try:
        # A loss may have state or draw random numbers, which a resumed run must not find changed.
        copied = copy.deepcopy(loss_fn)
        generators = StatefulRNG(0, reseed=False)
        # Both calls draw the same numbers: with other ones, the value of a sum could stay the same by chance.
        with generators.preserved(), torch.no_grad():
            once = float(copied(logits, labels))
        with generators.preserved(), torch.no_grad():
            twice = float(copied(logits.repeat(2, 1), labels.repeat(2)))
    except Exception:
        # Some losses need complete rows. What fails for other reasons fails, and is reported, with the batch.
        return True
    if not math.isfinite(once):
        return False
    if once == 0 or not math.isclose(once, twice, rel_tol=_MEAN_TOLERANCE):
        return True
    function: Any = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    count = len(positions)
    raise RecipeError(
        "the loss is a mean, but must be the sum over the labels",
        where="loss_fn",
        value=f"{name}: {once:.4g} for {count} labels, {twice:.4g} for each of them twice",
        hint="return the sum over all labels except -100: the recipe divides it by the labels of the global batch",
    )


def check_labels(loss_fn: LossFn) -> None:
    """Validate that a loss of torch accepts the arguments of a :data:`LossFn`, by calling it for two positions.

    Raises :class:`RecipeError` otherwise. The user's own code is not tried: it may require a certain vocabulary.
    """
    if not type(loss_fn).__module__.startswith("torch."):
        return
    try:
        loss_fn(torch.zeros(2, 3), torch.tensor([1, IGNORE_INDEX]))
    except Exception as error:
        raise RecipeError(
            "this loss does not accept logits and label ids",
            where="loss_fn",
            value=f"{type(loss_fn).__name__}: {error}",
            hint="use torch.nn.CrossEntropyLoss, or a function (logits, labels) of your own that returns the sum",
        ) from error


MTP_LOSS = "mtp_loss"
"""The metric of a micro-batch that is the mean of its depths' summed losses."""


def labels_of_depths(labels: Tensor, num_depths: int, position_ids: Tensor | None = None) -> Tensor:
    """The labels [(1 + D) * B, T] of the model and of D depths, from labels [B, T] that are not shifted.

    They are shifted like the model's labels: position i predicts the label of position i + 1. *position_ids* [B, T]
    restart at 0 with each sample of a row; None, or another shape: each row is one sample.
    """
    sample = torch.zeros_like(labels)
    if position_ids is not None and position_ids.shape == labels.shape:
        sample = (position_ids == 0).cumsum(1)
    found = [labels]
    for depth in range(1, num_depths + 1):
        shifted = torch.full_like(labels, IGNORE_INDEX)
        # Column j of the result is read as the label that position j - 1 predicts. It comes from column j + depth.
        last = labels.shape[1] - depth
        if last > 1:
            targets = labels[:, 1 + depth :]
            is_same_sample = sample[:, : last - 1] == sample[:, 1 + depth :]
            shifted[:, 1:last] = targets.masked_fill(~is_same_sample, IGNORE_INDEX)
        found.append(shifted)
    return torch.cat(found)
