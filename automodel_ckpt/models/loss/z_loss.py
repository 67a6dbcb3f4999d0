"""The z-loss, which keeps the logits of a model from drifting: the square of the log of the softmax's denominator."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100


class ZLoss:
    """Adds ``coefficient * logsumexp(logits) ** 2`` to the loss of each label. Source: arXiv:2204.02311, section 5.

    The value without gradient is summed until :meth:`take`; this does not wait for the device.
    """

    def __init__(self, coefficient: float, device: torch.device) -> None:
        self.coefficient = coefficient
        self._sum = torch.zeros((), device=device)

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The z-loss of *logits* [N, V], summed over *labels* [N] other than -100; 0-dim, with a gradient."""
        return self.of_logs(torch.logsumexp(logits, dim=1), labels).sum()

    def of_logs(self, logs: Tensor, labels: Tensor) -> Tensor:
        """The z-loss [N] of each position by its logsumexp in *logs* [N]; 0 where *labels* [N] are -100."""
        return (logs.square() * self.coefficient).masked_fill(labels == IGNORE_INDEX, 0)

    def factors(self, logs: Tensor) -> Tensor:
        """What the softmax in the gradient of the cross-entropy is multiplied by for both losses: [N] for *logs* [N].

        The gradient of logsumexp is the softmax, so the gradient of its scaled square is ``2 * coefficient * logs``
        times it.
        """
        return logs.mul(2 * self.coefficient).add_(1)

    def note(self, value: Tensor) -> None:
        """Add *value*, 0-dim, to what :meth:`take` returns."""
        self._sum = self._sum + value.detach()

    def take(self) -> Tensor:
        """Return the sum of the values noted since the last call, 0-dim, and begin again."""
        value, self._sum = self._sum, torch.zeros_like(self._sum)
        return value
