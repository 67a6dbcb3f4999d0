"""Token accuracy without complete logits: counts how often the label has the highest logit, chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from automodel_ckpt.models.loss.loss_inputs import VocabularyPart

_NO_COLUMN = 2**62
"""Greater than any index of a token."""


class TokenHits:
    """Counts the positions whose highest logit is that of their label; it does not wait for the device before the end.

    Of several equal logits, the first one counts as the highest, as in ``torch.argmax``.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def add(
        self, logits: torch.Tensor, labels: torch.Tensor, part: VocabularyPart | None = None
    ) -> None:
        """Count the positions of *logits* [N, V] whose highest one is that of *labels* [N]; label -100 is ignored.

        A positive scale and a cap by tanh do not change which logit is the highest, so they can be left out. With
        *part*, the columns are those of this rank. This is collective, and all ranks get the same count.
        """
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        largest, predicted = logits.detach().max(dim=1)
        if part is not None:
            overall = largest.clone()
            part.largest(overall)
            is_here = largest == overall
            predicted = torch.where(is_here, predicted + part.first, _NO_COLUMN)
            part.smallest(predicted)
        self._count += (predicted == labels).sum()

    @property
    def count(self) -> torch.Tensor:
        """The count so far, 0-dim on the device."""
        return self._count

    def read(self) -> int:
        """Wait for the device, and return the count."""
        return int(self._count.item())
