"""Whether a model separates samples that share a row, found by running it on a few tokens.

A model's class does not show this: some models take ``position_ids`` and still let attention cross from one sample to
the next (OPT), and a state space model carries its state over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automodel_ckpt.models.inspect.forward import (
    class_and_message,
    forward_parameters,
    logits_of,
    side_effect_free,
)

log = logging.getLogger(__name__)

# Small token ids, which every vocabulary has. _OTHER replaces _FIRST to show whether _SECOND sees
# it.
_FIRST, _OTHER, _SECOND = [1, 2, 3], [3, 1, 2], [2, 2, 1, 3]
_ROUNDING_FACTOR = 16
"""How much larger the rounding of one comparison can be than the rounding of another one."""


@dataclass(frozen=True)
class Answer:
    """The result of a probe; *reason* is the end of a message that states why it does not hold, or empty."""

    holds: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.holds

    @classmethod
    def of_error(cls, error: Exception) -> Answer:
        """The answer of a probe that *error* ended."""
        return cls(False, f" (a forward pass of a few tokens raised {class_and_message(error)})")


def keeps_samples_apart(
    model: nn.Module,
    one_row: bool,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
    max_row_length: int | None = None,
) -> Answer:
    """Whether samples in one row, separated by ``position_ids`` alone, have the outputs that they have in a row alone.

    Runs *model* with *options* on a few tokens, on *device* (default: the device of its parameters), without side
    effects on its mode and the random state. *multiple* divides the length of the rows; *one_row* runs one row at a
    time. The answer is also false if the forward pass fails, for models of transformers with ``use_cache``, which look
    for samples in a row only without a cache, and for models with a mask of a fixed length that rows of
    *max_row_length* tokens (None: unlimited) exceed.
    """
    if "position_ids" not in forward_parameters(model):
        return Answer(False)
    length = _mask_length(model)
    if length and (max_row_length is None or max_row_length > length):
        return Answer(False, f" (its mask has {length} positions, and rows can be longer)")
    padding = _padding(multiple)
    restarted = [*range(3), *range(4), *padding]
    swapped = [*range(4), *range(3), *padding]
    tokens_and_positions = [
        (_FIRST + _SECOND, restarted),
        (_OTHER + _SECOND, restarted),
        (_FIRST + _SECOND, [*range(7), *padding]),
        (_SECOND + _FIRST, swapped),
        (_SECOND + _OTHER, swapped),
    ]
    tokens = [row + padding for row, _ in tokens_and_positions]
    positions = [row for _, row in tokens_and_positions]
    try:
        with side_effect_free(model):
            device = device or next(model.parameters()).device
            rows = torch.tensor([tokens, positions], device=device)
            outputs = _logits(model, rows, one_row, options)
        after_first, after_other, crossed = outputs[0, 3:7], outputs[1, 3:7], outputs[2, 3:7]
        alone, alone_again = outputs[3, :4], outputs[4, :4]
        if not torch.cat([after_first, after_other, crossed, alone]).isfinite().all():
            return Answer(False, " (its outputs are not finite: look for NaN in its weights)")
        # The effect of crossing attention is the scale: rounding is far below it in every dtype.
        allowed = 0.1 * _distance(crossed, alone)
        largest = max(_distance(after_first, alone), _distance(after_other, alone))
        # Beside attention that does not cross, a recurrent layer can carry over little, in particular with random
        # weights. The same tokens in the same place get the same values bit by bit, whatever other sample is in the
        # row, except that layers of experts compute groups of other sizes, and FP8 has one scale for a tensor. What
        # comes later in a row has the same effect on rounding, and cannot have another one.
        rounding = _ROUNDING_FACTOR * _distance(alone, alone_again)
        magnitude = float(alone.abs().max())
        seen = _distance(after_first, after_other)
        has_experts = any("experts" in name for name, _ in model.named_modules())
        smallest_effect = 1e-2 if has_experts else 1e-6
        is_rounding = seen <= rounding + smallest_effect * magnitude
        return Answer(largest <= allowed and is_rounding)
    except Exception as error:
        log.debug("could not probe the model for packed samples", exc_info=True)
        return Answer.of_error(error)


def _mask_length(model: nn.Module) -> int | None:
    """The length of a causal mask [1, 1, T, T] that a layer keeps as a buffer, as in GPT-Neo; None without one."""
    for buffer in model.buffers():
        is_square = buffer.dim() == 4 and buffer.shape[-1] == buffer.shape[-2] > 1
        if is_square and buffer.dtype == torch.bool:
            return buffer.shape[-1]
    return None


def probe_rows(multiple: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A row of a few samples, to compare ways of computing attention.

    Returns (token ids, position ids that restart with each sample, position ids of a single sample), each [1, T] with T
    divisible by *multiple*.
    """
    padding = _padding(multiple)
    tokens = [*_FIRST, *_SECOND, *padding]
    restarted = [*range(3), *range(4), *padding]
    continued = [*range(7 + len(padding))]
    rows = torch.tensor([tokens, restarted, continued], device=device)
    first, second, third = torch.split(rows, 1)
    return first, second, third


def _padding(multiple: int) -> list[int]:
    """Samples of one token each that make the length of a row a multiple."""
    return [0] * (-len(_FIRST + _SECOND) % multiple)


def _logits(model: nn.Module, rows: Tensor, one_row: bool, options: Mapping[str, Any]) -> Tensor:
    """Logits [B, T, V] of *rows* [2, B, T], which are token ids and position ids."""
    size = 1 if one_row else rows.shape[1]
    outputs = []
    for tokens, positions in torch.split(rows, size, dim=1):
        output = model(input_ids=tokens, position_ids=positions, **options)
        outputs.append(logits_of(output))
    return torch.cat(outputs).float()


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())
