"""The policy for samples that are longer than ``seq_length``: reject or truncate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from automodel_ckpt.data.collate import (
    Integers,
    Where,
)
from automodel_ckpt.data.rows.arguments import require_choice, require_range
from automodel_ckpt.data.samples.tokenized import REPEATED_PROMPT, Samples, TokenizedSample
from automodel_ckpt.errors import RecipeError

POLICIES = ("error", "right", "skip", "history")
_NUM_SHOWN = 3
UNLIMITED = 2**31 - 1
"""A number of tokens that no sample has."""


@dataclass
class Truncation:
    """The policy for samples of more than *seq_length* tokens.

    ``error`` rejects them, ``right`` truncates them, and ``skip`` skips them, as does ``history``, with which the
    builder removes old messages before. Counts the truncated samples, the samples that were skipped
    because they are too long or no label remained, the samples with an empty completion, and their *notes*.
    """

    policy: str
    seq_length: int
    num_seen: int = field(default=0, init=False)
    num_cut: int = field(default=0, init=False)
    num_left_out: int = field(default=0, init=False)
    num_empty: int = field(default=0, init=False)
    notes: Counter[str] = field(default_factory=Counter, init=False)

    @classmethod
    def of(cls, policy: str, seq_length: int | None) -> Truncation:
        """Make the policy of a builder, where *seq_length* None is no limit."""
        return cls(policy, UNLIMITED if seq_length is None else seq_length)

    @property
    def limit(self) -> int | None:
        """The maximum tokens of a sample; None without a limit."""
        return None if self.seq_length == UNLIMITED else self.seq_length

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of samples that were truncated or skipped, and of those with an empty completion."""
        return self.num_cut, self.num_left_out, self.num_empty

    def __post_init__(self) -> None:
        require_choice("truncation", self.policy, POLICIES)
        # A token and the one it predicts.
        require_range("seq_length", self.seq_length, 2)

    def anew(self) -> Truncation:
        """Return the same policy with counts of zero."""
        return type(self)(self.policy, self.seq_length)

    def apply(self, samples: Sequence[TokenizedSample], where: Where) -> Samples:
        """Return the samples of a row, truncated if needed; none of them if one of them is to be skipped.

        They count as one sample. With the policy ``error``, raises :class:`RecipeError` with the location ``where()``
        for a long sample.
        """
        notes = {note for sample in samples for note in sample.notes}
        if not all(REPEATED_PROMPT in sample.notes for sample in samples):
            # One of two answers may begin with the prompt by chance.
            notes.discard(REPEATED_PROMPT)
        self.notes.update(notes)
        self.num_seen += 1
        remaining = []
        for sample in samples:
            truncated = self._truncated(sample, where)
            # The first token is never predicted.
            if not any(truncated.labelled[1:]):
                self.num_left_out += 1
                return []
            remaining.append(truncated)
        self.num_cut += any(len(sample.tokens) > self.seq_length for sample in samples)
        self.num_empty += any(sample.is_empty for sample in samples)
        return remaining

    def _truncated(self, sample: TokenizedSample, where: Where) -> TokenizedSample:
        """Return the sample, truncated if needed; without labels if it is to be skipped."""
        if len(sample.tokens) <= self.seq_length:
            return sample
        # A sample without labels is skipped, also if it is too long.
        if self.policy == "error" and any(sample.labelled[1:]):
            length = np.array([len(sample.tokens)])
            self.require_short(np.zeros(1, np.int64), length, lambda _: where())
        labelled = sample.labelled[: self.seq_length] if self.policy == "right" else []
        tokens = sample.tokens[: self.seq_length]
        return TokenizedSample(tokens, labelled, number=sample.number)

    def require_short(
        self,
        used: Integers,
        lengths: Integers,
        where: Callable[[int], str],
    ) -> None:
        """Raise one :class:`RecipeError` for all samples with labels that are longer than ``seq_length``.

        *used* are the rows of the samples with labels, *lengths* the numbers of tokens of the longest one of each.
        """
        too_long = np.flatnonzero(lengths > self.seq_length)
        if not len(too_long):
            return
        places = [
            f"{where(int(used[each]))} ({lengths[each]} tokens)" for each in too_long[:_NUM_SHOWN]
        ]
        if len(too_long) > len(places):
            places.append(f"and {len(too_long) - len(places)} more")
        longest = int(lengths.max())
        percentile = int(np.percentile(lengths, 99, method="higher"))
        what = "samples are longer than seq_length"
        if len(too_long) == 1:
            what = "a sample is longer than seq_length"
        raise RecipeError(
            what,
            where=", ".join(places),
            value=f"{len(too_long)} of {len(used)} samples; seq_length {self.seq_length}, "
            f"the longest sample {longest} tokens, the 99th percentile {percentile}",
            hint=f"increase dataset.seq_length to {longest}, set dataset.truncation right to truncate such samples, "
            "or remove them",
        )


class EarlierTruncation(Truncation):
    """Counts the samples that an encoder has truncated itself, and skips those that have lost all labels."""

    def apply(self, samples: Sequence[TokenizedSample], where: Where) -> Samples:
        self.num_seen += 1
        # A sample of texts with one token each has no labels either.
        remaining = [sample for sample in samples if any(sample.labelled) or not sample.is_cut]
        self.num_left_out += len(samples) - len(remaining)
        self.num_cut += sum(sample.is_cut for sample in remaining)
        self.num_empty += sum(sample.is_empty for sample in remaining)
        return remaining
