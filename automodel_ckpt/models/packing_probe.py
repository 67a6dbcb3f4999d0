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
from torch import nn

from automodel_ckpt.models.forward import (
    class_and_message,
    forward_parameters,
    logits_of,
    side_effect_free,
)

log = logging.getLogger(__name__)

# Small token ids, which every vocabulary has. _OTHER replaces _FIRST to show whether _SECOND sees
# it.
_FIRST, _OTHER, _SECOND = [1, 2, 3], [3, 1, 2], [2, 2, 1, 3]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a probe; *error* is what the model raised, or empty."""

    holds: bool
    error: str = ""

    def __bool__(self) -> bool:
        return self.holds

    @property
    def reason(self) -> str:
        """The model's error as the end of a message; empty if there was none."""
        return f" (a forward pass of a few tokens raised {self.error})" if self.error else ""


def keeps_samples_apart(
    model: nn.Module,
    one_row: bool,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
) -> Answer:
    """Whether samples in one row, separated by ``position_ids`` alone, have the outputs that they have in a row alone.

    Runs *model* with *options* on a few tokens, on *device* (default: that of its parameters), without side effects on
    its mode and the random state. *multiple* divides the length of the rows; *one_row* runs one row at a time. The
    answer is also false if the forward pass fails, and for models of transformers with ``use_cache``, which look for
    samples in a row only without a cache.
    """
    if "position_ids" not in forward_parameters(model):
        return Answer(False)
    padding = _padding(multiple)
    restarted = [*range(3), *range(4), *padding]
    tokens_and_positions = [
        (_FIRST + _SECOND, restarted),
        (_OTHER + _SECOND, restarted),
        (_FIRST + _SECOND, [*range(7), *padding]),
        (_SECOND + _FIRST, [*range(4), *range(3), *padding]),
    ]
    tokens = [row + padding for row, _ in tokens_and_positions]
    positions = [row for _, row in tokens_and_positions]
    try:
        with side_effect_free(model):
            device = device or next(model.parameters()).device
            rows = torch.tensor([tokens, positions], device=device)
            outputs = _logits(model, rows, one_row, options)
        after_first, after_other, crossed = outputs[0, 3:7], outputs[1, 3:7], outputs[2, 3:7]
        alone = outputs[3, :4]
        # The effect of crossing attention is the scale: rounding is far below it in every dtype.
        allowed = 0.1 * _distance(crossed, alone)
        largest = max(_distance(after_first, alone), _distance(after_other, alone))
        return Answer(largest <= allowed)
    except Exception as error:
        log.debug("could not probe the model for packed samples", exc_info=True)
        return Answer(False, class_and_message(error))


def probe_rows(
    multiple: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def _logits(
    model: nn.Module, rows: torch.Tensor, one_row: bool, options: Mapping[str, Any]
) -> torch.Tensor:
    """Logits [B, T, V] of *rows* [2, B, T], which are token ids and position ids."""
    size = 1 if one_row else rows.shape[1]
    outputs = []
    for tokens, positions in torch.split(rows, size, dim=1):
        output = model(input_ids=tokens, position_ids=positions, **options)
        outputs.append(logits_of(output))
    return torch.cat(outputs).float()


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())
