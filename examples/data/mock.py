"""Random tokens, to try a model or to measure speed without data."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from automodel_ckpt.data.batches.micro_batches import derive_seed
from automodel_ckpt.data.collate import Sample, require_range
from automodel_ckpt.errors import RecipeError

_MIN_LENGTH = 2


class RandomTokens:
    """A map-style data set of random tokens with labels on all of them. Nothing is stored: samples are made when read.

    Sample i is a function of the seed and i, so it is the same on every rank and after a resume.
    """

    draws_nothing = True

    def __init__(
        self,
        num_samples: int,
        lengths: tuple[float, float, int],
        tokens: tuple[int, int],
        end_token: int | None,
        seed: int,
    ) -> None:
        """*lengths* are the mean, the standard deviation and the maximum; *tokens* the first id and the one after the
        last."""
        self.num_samples = num_samples
        self.mean_length, self.std_length, self.max_length = lengths
        self.first_token, self.vocab_size = tokens
        self.end_token = end_token
        self.seed = seed
        self.identity = f"random_tokens {num_samples} {lengths} {tokens} {end_token} {seed}"

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        # IndexError also ends an iteration over this class, which has no __iter__.
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        generator: Any = np.random.Generator(np.random.PCG64(derive_seed(self.seed, index)))
        length = round(generator.normal(self.mean_length, self.std_length))
        length = min(max(length, _MIN_LENGTH), self.max_length)
        tokens = generator.integers(self.first_token, self.vocab_size, size=length).tolist()
        if self.end_token is not None:
            tokens[-1] = self.end_token
        return {"input_ids": tokens, "labels": list(tokens)}


def random_tokens(
    num_samples: int = 10000,
    seq_length: int = 1024,
    vocab_size: int | Literal["model"] = 1024,
    mean_length: float | None = None,
    std_length: float = 0.0,
    first_token: int = 0,
    end_token: int | None = None,
    seed: int = 0,
) -> RandomTokens:
    """Make *num_samples* samples of random tokens from *first_token* to *vocab_size* - 1, with labels on all of them.

    A sample has *seq_length* tokens or, if *mean_length* is set, a length with a normal distribution of this mean and
    the standard deviation *std_length*, from 2 to *seq_length*. Its last token is *end_token* if that is set. A
    *vocab_size* of ``model`` is that of the recipe's model. Needs no tokenizer (``tokenizer: null``). Raises
    :class:`RecipeError` for sizes that are too small.
    """
    if vocab_size == "model":
        raise RecipeError(
            "the size of the model's vocabulary is not known",
            where="dataset.vocab_size",
            value=vocab_size,
            hint="give the number of tokens",
        )
    require_range("num_samples", num_samples, 1)
    require_range("seq_length", seq_length, _MIN_LENGTH)
    require_range("first_token", first_token, 0, vocab_size - 1)
    require_range("std_length", std_length, 0)
    require_range("seed", seed, 0)
    if mean_length is None:
        mean_length = seq_length
    require_range("mean_length", mean_length, 1, seq_length)
    if end_token is not None:
        require_range("end_token", end_token, 0)
    lengths = (float(mean_length), float(std_length), seq_length)
    return RandomTokens(num_samples, lengths, (first_token, vocab_size), end_token, seed)
