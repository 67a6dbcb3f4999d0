"""A teacher without training: how often each token follows another in the text of :mod:`.python_docs`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import language_modeling, train_tokenizer

_LARGEST_VOCABULARY = 8192
"""With this many entries, the table has 256 MB."""


def pair_counts(vocab_size: int = 1024, prior: float = 2.0) -> PairCounts:
    """Build a teacher that predicts a token by how often it follows the token before, in the training split of
    :func:`~.python_docs.language_modeling` with the tokenizer of :func:`~.python_docs.train_tokenizer` of *vocab_size*
    entries.

    Its logits are log-probabilities. They are smoothed: each token has *prior* further successors, which are
    distributed by the frequencies of all tokens. Raises :class:`RecipeError` for a *prior* that is not positive, and
    for more than 8192 entries.
    """
    if vocab_size > _LARGEST_VOCABULARY:
        raise RecipeError(
            "the table of pairs of this many tokens would be too large",
            where="vocab_size",
            value=vocab_size,
            hint=f"give at most {_LARGEST_VOCABULARY}",
        )
    if not 0 < prior < math.inf:
        raise RecipeError(
            "without a prior, pairs that the text does not have would be impossible",
            where="prior",
            value=prior,
            hint="give a number above 0, such as 2",
        )
    tokens = language_modeling(train_tokenizer(vocab_size)).tokens.astype(np.int64)
    pairs = tokens[:-1] * vocab_size + tokens[1:]
    counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    frequencies = np.bincount(tokens, minlength=vocab_size) + 1.0
    frequencies /= frequencies.sum()
    probabilities = counts + prior * frequencies
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return PairCounts(torch.from_numpy(np.log(probabilities)).float())


class PairCounts(nn.Module):
    """A language model that knows only the token before: a table [V, V] of logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(logits)  # type: ignore[no-untyped-call]

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of *input_ids* [B, T]; other inputs are not used."""
        logits: torch.Tensor = self.table(input_ids)
        return logits
