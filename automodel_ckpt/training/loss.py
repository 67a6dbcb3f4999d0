"""Next-token loss as a sum over label tokens, so that the mean over a global batch does not depend on its division.

The weight of a rank's loss depends on the label tokens of all ranks and micro-batches. So losses are sums here, and the
caller divides once by the global count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from automodel_ckpt.errors import RecipeError

IGNORE_INDEX = -100
WHOLE = slice(None)
"""All positions of a row."""

LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``loss_fn(logits [N, V], labels [N])`` -> 0-dim *sum* over the positions whose label is not -100.

The tensors are shifted (position i predicts label i), flattened over the batch, and in the model's dtype. A
``loss_fn: {_target_: ...}`` section builds one; ``reduction="sum"`` is supplied where the callable has that parameter
(so ``torch.nn.CrossEntropyLoss`` works as it is).
"""


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [N, V] and labels [N], summed over labels other than -100; 0-dim.

    It is computed in float32, or in float64 where the logits are.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels [B, T] moved one to the left, so that position i holds the token it has to predict; the last is -100."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def labelled_positions(
    labels: torch.Tensor, part: slice = WHOLE, *, all_up_to: int = 0
) -> tuple[torch.Tensor | None, torch.Tensor]:
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


def in_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor of a batch as an array, which shares the tensor's memory if possible."""
    # force copies from other devices and drops gradients, but takes five times as long.
    needs_force = not tensor.is_cpu or tensor.requires_grad
    return tensor.numpy(force=needs_force)


def num_label_tokens(labels: torch.Tensor) -> int:
    """The number of predicted labels in [B, T]: all except -100 and the first of each row, which nothing precedes."""
    return int(np.count_nonzero(in_numpy(labels)[:, 1:] != IGNORE_INDEX))


def next_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_fn: LossFn = cross_entropy_sum,
    part: slice = WHOLE,
) -> torch.Tensor:
    """The sum of *loss_fn* over a micro-batch, 0-dim.

    *labels* [B, T] are unshifted. *logits* are [B, T, V], or those of a *part* of each row, on the same device. Raises
    :class:`RecipeError` for logits or losses of another shape.
    """
    _require_logits(logits, labels[:, part])
    loss = loss_fn(logits.flatten(0, 1), shift_labels(labels)[:, part].flatten())
    if loss.dim() != 0:
        raise RecipeError(
            "the loss must be a scalar, the sum over all positions",
            where="loss_fn",
            value=f"a tensor of shape {list(loss.shape)}",
            hint="sum the values that loss_fn computes for each position",
        )
    return loss


def _require_logits(logits: object, labels: torch.Tensor) -> None:
    found = type(logits).__name__
    if isinstance(logits, torch.Tensor):
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
            hint="use torch.nn.CrossEntropyLoss, or a function of your own with the arguments (logits, labels)",
        ) from error
