"""Pairs with their log-probabilities under a reference model, which are computed before training."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.preference import REFERENCE_CHOSEN, REFERENCE_REJECTED
from automodel_ckpt.errors import AutomodelError, RecipeError

SCORES = (REFERENCE_CHOSEN, REFERENCE_REJECTED)
"""The names of both log-probabilities in samples and micro-batches."""
Scores = npt.NDArray[np.float32]


class ScoredPairs:
    """The pairs of *dataset*, a map-style data set, with the log-probabilities of both answers under a reference.

    Assign :attr:`scores` [pairs, 2] before samples are read. Raises :class:`RecipeError` for a stream.
    """

    # A promise about this class; that of the data set is examined as well.
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise RecipeError(
                "the reference's log-probabilities of a stream cannot be computed before training",
                where="dpo.precompute",
                value=True,
                hint="set dpo.precompute false, or dataset.streaming false",
            )
        self.dataset = dataset
        self.scores: Scores | None = None

    @property
    def identity(self) -> str | None:
        """A digest that changes with the pairs; None if unknown."""
        return getattr(self.dataset, "identity", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = self.dataset[index]
        if self.scores is None:
            raise AutomodelError(
                "the reference's log-probabilities are not computed yet",
                where="ScoredPairs.scores",
                value=None,
                hint="assign them before samples are read",
            )
        chosen, rejected = self.scores[index].tolist()
        return {**pair, REFERENCE_CHOSEN: chosen, REFERENCE_REJECTED: rejected}
