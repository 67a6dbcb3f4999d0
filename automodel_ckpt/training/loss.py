"""Next-token loss as a sum over labelled tokens, so that a global batch is one mean however it is cut up.

A rank cannot know its loss's weight before it knows the label tokens of all ranks and micro-batches. So losses stay
sums here, and the caller divides by the global count once.
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
"""All places of a row."""

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
    """Of labels [B, T] unshifted: the places [N] in the flattened batch that predict a label, and the labels [N].

    Of a *part* of each row: the places in the flattened batch of those parts. Both are on the CPU, like a batch. Of no
    more than *all_up_to* places all are returned: None for the places, and labels among which -100 counts for none.
    """
    # numpy: three times as fast as torch on tensors this small, in each step.
    rows = in_numpy(labels)
    shifted = np.full_like(rows, IGNORE_INDEX)
    shifted[:, :-1] = rows[:, 1:]
    flat = shifted[:, part].reshape(-1)
    if flat.size <= all_up_to:
        return None, torch.from_numpy(flat)
    positions = np.flatnonzero(flat != IGNORE_INDEX)
    return torch.from_numpy(positions), torch.from_numpy(flat[positions])


def in_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor of a batch; they share its memory where they can, as almost always."""
    return tensor.numpy(
        force=not tensor.is_cpu or tensor.requires_grad
    )  # force takes five times as long


def num_label_tokens(labels: torch.Tensor) -> int:
    """How many of labels [B, T] are predicted: all but -100 and the first of each row, which nothing precedes."""
    return int(np.count_nonzero(in_numpy(labels)[:, 1:] != IGNORE_INDEX))


def next_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_fn: LossFn = cross_entropy_sum,
    part: slice = WHOLE,
) -> torch.Tensor:
    """Sum of *loss_fn* over a micro-batch: labels [B, T] unshifted, logits [B, T, V] or of a *part* of each row; 0-dim.

    Both are on one device. Raises :class:`RecipeError` for what is not that.
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
    is_tensor = isinstance(logits, torch.Tensor)
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else []
    if len(shape) == 3 and shape[:2] == list(labels.shape):
        return
    raise RecipeError(
        "the model returns no logits for each token, which the next-token loss requires",
        where="model",
        value=f"a tensor of shape {shape} for {list(labels.shape)} tokens"
        if is_tensor
        else type(logits).__name__,
        hint="use a causal language model (transformers' AutoModelForCausalLM), let yours return logits [B, T, V], "
        "or compute another loss in a recipe of your own (Objective.loss)",
    )


def check_labels(loss_fn: LossFn) -> None:
    """Raise :class:`RecipeError` where a loss of torch's cannot take what a :data:`LossFn` is given: it is tried on two
    positions. One's own code is not: it may be made for a certain vocabulary."""
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
