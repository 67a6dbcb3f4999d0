"""What a validation adds up over the batches of a set: losses, counts, and the metrics of the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.models.loss.loss_inputs import TokenHits
from automodel_ckpt.parallel.ranks.agree import gather_objects

HITS = "hits"
"""The name of the sum that counts the labels with the highest logit."""

ACCURACY, PERPLEXITY = "accuracy", "perplexity"
"""Measures of objectives that predict the next token."""
_LARGEST_EXPONENT = 709.0
"""exp() of more than this overflows in float64."""

Sums = Mapping[str, Sequence[float]]


class EvaluationSums:
    """Adds up the metrics of an objective over this rank's batches, on the device until :meth:`read`."""

    def __init__(self, device: torch.device) -> None:
        self.hits = TokenHits(device)
        """Counts the labels with the highest logit, for objectives that predict the next token."""
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add *value*, 0-dim or 1-dim, to the sum with this name."""
        # float64, as in the reduction over the ranks.
        value = torch.as_tensor(value).detach().double()
        before = self._sums.get(name)
        self._sums[name] = value if before is None else before + value

    def read(self) -> dict[str, list[float]]:
        """Wait for the device, and return the sums by name. One number for a 0-dim value."""
        sums = {name: value.flatten().tolist() for name, value in self._sums.items()}
        return {HITS: [float(self.hits.read())], **sums}


@dataclass(frozen=True)
class EvaluationTotals:
    """The totals of a validation set over all ranks.

    *loss* is the sum over *count* terms, *num_label_tokens* the number of tokens with a label. *sums* has the sums
    of the objective's metrics, by name.
    """

    loss: float
    count: int
    num_label_tokens: int
    sums: Sums = field(default_factory=dict)

    @property
    def mean_loss(self) -> float:
        """The loss per term. NaN for a set without terms."""
        return self.loss / self.count if self.count else math.nan

    def mean(self, name: str) -> float:
        """The sum *name*, which is one number, per term. NaN for a set without terms, and if nothing was added."""
        values = self.sums.get(name)
        return values[0] / self.count if values and self.count else math.nan


def sum_by_name(group: ProcessGroup | None, here: Sums) -> dict[str, list[float]]:
    """Add up the sums of all ranks, by name. A collective. A rank may lack names that others have."""
    totals: dict[str, list[float]] = {}
    for sums in gather_objects(group, dict(here)):
        for name, values in sums.items():
            before = totals.get(name, [0.0] * len(values))
            totals[name] = [a + b for a, b in zip(before, values, strict=True)]
    return totals


def perplexity(loss: float) -> float:
    """The exponential of a mean cross-entropy. Infinite where that overflows, and NaN for NaN."""
    return math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)
