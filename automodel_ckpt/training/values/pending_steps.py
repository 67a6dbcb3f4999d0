"""The newest steps of a run, until the ranks have added up their numbers.

The ranks need a step's loss only for the log and for the rules that stop a run. So they add it up in the exchange that
precedes the next step, instead of in another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.training.values.readback import LaunchedStep


class PendingSteps:
    """Steps that are counted but not logged, oldest first: their numbers are not added up over the ranks."""

    def __init__(self, *, runs_ahead: bool, counts_loss: bool) -> None:
        """*runs_ahead*: the device may still compute the newest step. *counts_loss*: this rank adds its loss to the
        sum; of ranks that compute the same loss, one does."""
        self._num_in_progress = 1 if runs_ahead else 0
        self._counts_loss = counts_loss
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def batches(self) -> list[GlobalBatch]:
        """The global batches of the steps."""
        return [step.batch for step in self._steps]

    def add(self, step: LaunchedStep) -> None:
        """Add the newest step."""
        self._steps.append(step)

    def oldest(self, *, wait: bool) -> LaunchedStep | None:
        """The oldest step; None if there is none, or if the device may still compute it and *wait* is false."""
        first_in_progress = 0 if wait else self._num_in_progress
        return self._steps[0] if len(self._steps) > first_in_progress else None

    def remove_oldest(self) -> None:
        """Remove the oldest step, whose numbers are added up."""
        self._steps.popleft()

    def sums_here(self, step: LaunchedStep | None, numbers: Mapping[str, float]) -> list[float]:
        """What this rank adds to the sums of *step* over the ranks: loss, router's loss, and the objective's metrics.

        *numbers* are those of the step on this rank. Zeros for the two losses if there is no step.
        """
        if step is None:
            return [0.0, 0.0]
        sums = [numbers["loss"] if self._counts_loss else 0.0, numbers["aux_loss"]]
        for name in step.metrics:
            sums.append(numbers[f"metric {name}"] if self._counts_loss else 0.0)
        return sums
