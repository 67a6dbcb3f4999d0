"""The values that the parts of a run pass to each other: what all ranks agreed on, measurements, validation sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from automodel_ckpt.models.loss.fused_cross_entropy import TokenHits
from automodel_ckpt.parallel.ranks.agree import gather_objects

Number = float | Tensor
"""A number of a step: on the host, or a 0-dim tensor."""
Z_LOSS = "z_loss"
"""The metric of a micro-batch that is its z-loss, times its coefficient."""
LABEL_TOKENS = "label_tokens"
"""What the loss of predicting the next token is a mean over. Both logs have the count under this name."""
AUX_LOSS = "aux_loss"
"""The metric of a micro-batch that is its share of the router's load balancing loss."""


@dataclass(frozen=True)
class ClockReading:
    """What rank 0's clock decides after a step: *elapsed_seconds* of training so far, whether a save is due by time,
    and whether ``max_time`` ends the run. *save_is_requested*: whether a user has requested a save, of any rank."""

    elapsed_seconds: float = 0.0
    save_is_wanted: bool = False
    time_is_up: bool = False
    save_is_requested: bool = False


@dataclass(frozen=True)
class BatchSize:
    """How large a micro-batch is: the terms that its loss is summed over, its label tokens, and its tokens.

    *flops* are the floating-point operations of a training pass over it. 0 if they are unknown or not logged.
    """

    count: int
    num_label_tokens: int
    num_tokens: int
    flops: float = 0.0


@dataclass(frozen=True)
class LossSum:
    """The loss of a micro-batch, summed over its terms (0-dim, on the device), and metrics by name.

    The metric ``aux_loss`` has a gradient, which the loop adds to the loss's gradient. Other metrics are sums over the
    same terms, under the same names on all ranks. The log has their means.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """What all ranks agreed on before a step: the size of the global batch, whether to stop, and whether a save in the
    background has failed. The loss of the global batch is a mean over *count* terms. *flops* are the floating-point
    operations of training on it, 0 if they are unknown or not logged. *clock* is from rank 0 after the previous step.
    """

    count: int
    num_label_tokens: int
    num_tokens: int
    stop: bool
    save_failed: bool = False
    flops: float = 0.0
    clock: ClockReading = field(default_factory=ClockReading)


@dataclass(frozen=True)
class Validation:
    """The mean loss over the validation set, the number of its label tokens, and the number of terms of its loss.

    *further* are the losses of the sets in ``validation_datasets`` and all other metrics, by the names that logs have.
    """

    loss: float
    num_label_tokens: int
    count: int
    further: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by the names that logs and ``losses.json`` have."""
        return {"val_loss": self.loss, **self.further}


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
