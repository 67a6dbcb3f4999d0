"""Tokenized samples, how long ones are truncated, and data sets of them in flat, memory-mapped arrays."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    Ids,
    Integers,
    Sample,
    Where,
    at_most,
    require_choice,
    require_index,
    require_range,
)
from automodel_ckpt.errors import RecipeError, printable

log = logging.getLogger(__name__)


class SampleArrays:
    """Samples that are concatenated: sample i has the elements ``ends[i - 1]`` to ``ends[i]`` of the long arrays."""

    ends: Integers

    @property
    def lengths(self) -> Integers:
        """The number of elements of each sample."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, index: int) -> slice:
        """The elements of sample *index*. Raises IndexError if there is none with this index."""
        require_index(index, len(self.ends))
        start = int(self.ends[index - 1]) if index else 0
        return slice(start, int(self.ends[index]))


def mapped_array(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map the numbers in a file into memory: a plain array, which is sliced ten times as fast as numpy's memmap."""
    # A mapping cannot be empty.
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


@dataclass(frozen=True)
class LengthSummary:
    """The lengths of *num_samples* samples in tokens, *num_tokens* together, of which *num_labels* have a label.

    *num_labels* is None where a label belongs to a sample, not to tokens.
    """

    num_samples: int
    median: int
    percentile_99: int
    longest: int
    num_tokens: int
    num_labels: int | None

    @classmethod
    def of(cls, lengths: Integers, num_labels: int | None) -> LengthSummary:
        """Summarize *lengths*, the number of tokens of each sample."""
        if not len(lengths):
            return cls(0, 0, 0, 0, 0, 0)
        # A length that occurs, not a mean of two.
        median, percentile_99, longest = map(
            int, np.percentile(lengths, [50, 99, 100], method="higher")
        )
        total = int(lengths.sum())
        return cls(len(lengths), median, percentile_99, longest, total, num_labels)

    @property
    def samples_text(self) -> str:
        """The number of samples in words."""
        return counted(self.num_samples, "sample")

    @property
    def lengths_text(self) -> str:
        """The lengths in words."""
        return f"median {self.median:,}, 99th percentile {self.percentile_99:,}, longest {self.longest:,} tokens"

    @property
    def tokens_text(self) -> str:
        """The number of tokens in words, and the fraction that is trained on."""
        if self.num_labels is None:
            return f"{self.num_tokens:,} tokens per epoch"
        share = 100 * self.num_labels / max(self.num_tokens, 1)
        return f"{self.num_tokens:,} tokens per epoch, {share:.0f}% of them trained on"

    def __str__(self) -> str:
        return f"{self.samples_text}, {self.lengths_text}; {self.tokens_text}"


ARRAYS: Mapping[str, npt.DTypeLike] = {"tokens": np.int32, "ends": np.int64, "labelled": np.bool_}
"""The files of a data set without a header -> the types of their numbers."""
NUMBERS = "numbers.npy"
COUNTS = "counts.json"
SEEN, TRUNCATED, SKIPPED, EMPTY = "seen", "truncated", "skipped", "empty"
"""The names of counts of samples: all, those that were truncated or skipped, and those with an empty completion. Other
names are notes: what a user should know about samples, in words."""
_NUM_NOTES = 10
"""Number of notes that are shown."""
REPEATED_PROMPT = (
    "an answer that begins with the text of its prompt, which is then there twice, the second time with labels: remove "
    "it from the data, or set each field of answers to a template, such as completion_field: "
    "'{{ completion[prompt|length:] }}'"
)
"""A note: an answer that repeats its prompt."""


class TokenizedSample(NamedTuple):
    """The tokens of a sample, whether each token has a label, and whether an answer in the sample has no text.

    *number* is a number or a list that the row has with its text, such as a margin; NaN: it has none. *is_cut*: the
    builder has already truncated a part of it. *notes* are what a user should know about it, in words.
    """

    tokens: Ids
    labelled: list[bool]
    is_empty: bool = False
    number: float | list[float] = math.nan
    is_cut: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def answer(cls, prompt: Ids, completion: Ids, is_empty: bool = False) -> TokenizedSample:
        """Make a sample of a prompt without labels and a *completion* with labels."""
        labelled = [False] * len(prompt) + [True] * len(completion)
        return cls(prompt + completion, labelled, is_empty)


Samples = list[TokenizedSample]
Counts = Counter[str]
"""How many samples were truncated, skipped and so on, by :data:`SEEN` and the names next to it, and by notes."""


class TokenizedDataset(SampleArrays):
    """A map-style data set of ``{"input_ids": list[int], "labels": list[int]}``, with the label -100 for no label.

    The samples are concatenated: sample i is ``tokens[ends[i - 1]:ends[i]]``.
    """

    draws_nothing = True
    group_size: ClassVar[int] = 1
    """Number of tokenized samples of a row. All samples of a row are skipped together."""
    noun: ClassVar[str] = "sample"
    """What an item is called in the log."""
    template: str | None = None
    """How conversations were rendered, in words; None for other samples."""
    identity: str | None = None
    """A digest that changes with the samples. None when unknown."""
    limit: int | None = None
    """The maximum tokens of a sample; None: there is none."""

    def __init__(self, directory: Path) -> None:
        """Load what :mod:`~automodel_ckpt.data.rows.preparation` wrote; the arrays are memory-mapped."""
        arrays = (mapped_array(directory / name, dtype) for name, dtype in ARRAYS.items())
        self.tokens, self.ends, self.labelled = arrays
        # np.load rejects pickled objects by default: a cache that others can write must not run code.
        self.numbers = np.asarray(np.load(directory / NUMBERS, mmap_mode="r"))
        self.counts = Counter[str](json.loads((directory / COUNTS).read_text("utf-8")))

    @property
    def summary(self) -> LengthSummary:
        """The lengths of the samples, and how many of their tokens have a label."""
        num_tokens = int(self.ends[-1]) if len(self.ends) else 0
        return LengthSummary.of(self.lengths, int(self.labelled[:num_tokens].sum()))

    @staticmethod
    def item(samples: Sequence[Sample], number: Any, limit: int | None) -> Any:
        """Make an item of the tokenized *samples* of a row, their *number*, and the maximum tokens of a sample."""
        return samples[0]

    def __len__(self) -> int:
        return len(self.ends) // self.group_size

    def __getitem__(self, index: int) -> Any:
        require_index(index, len(self))
        first = index * self.group_size
        samples = [self.sample(first + offset) for offset in range(self.group_size)]
        return self.item(samples, self.numbers[first], self.limit)

    def sample(self, index: int) -> Sample:
        """Return a tokenized sample. Raises IndexError if there is none with this index."""
        span = self.span(index)
        tokens = self.tokens[span]
        labels = np.where(self.labelled[span], tokens, IGNORE_INDEX)
        return {"input_ids": tokens.tolist(), "labels": labels.tolist()}

    def reported(self, what: str, seq_length: int, max_samples: int | None) -> Self:
        """Return a data set of the first *max_samples* items (None: all), and log their lengths.

        The numbers of truncated and skipped samples include all items, not only the first. *what* is the name of the
        data in the log. Raises :class:`RecipeError` if all samples were skipped.
        """
        limit = self.limit_text(seq_length)
        report_counts(what, self.counts, limit, self.noun)
        if self.counts[SKIPPED] and not len(self):
            raise RecipeError(
                "all samples of the data were skipped",
                where=what,
                value=f"{counted(self.counts[SKIPPED], self.noun)}; {limit}",
                hint="the warning above has the reason: raise seq_length, or give the samples something to learn",
            )
        # It shares the arrays.
        dataset = copy.copy(self)
        dataset.ends = self.ends[: at_most(max_samples, len(self)) * self.group_size]
        if self.group_size > 1:
            what = f"{what}: {counted(len(dataset), self.noun)}"
        log.info("%s: %s", what, dataset.summary)
        return dataset

    def limit_text(self, seq_length: int) -> str:
        """The limit of samples of at most *seq_length* tokens, in words."""
        return f"seq_length {seq_length}"


def report_counts(what: str, counts: Counts, limit: str, noun: str = "sample") -> None:
    """Log how many samples of *what* were truncated or skipped, have an empty completion, or a note.

    *limit* is the longest sample in words.
    """
    total = counted(counts[SEEN], noun)
    if counts[EMPTY]:
        log.warning(
            "%s: %d of %s have an empty completion: only the end token is trained on",
            *(what, counts[EMPTY], total),
        )
    for line in note_lines(counts):
        log.warning("%s: %s", what, line)
    if counts[TRUNCATED]:
        log.warning("%s: %d of %s truncated to %s", what, counts[TRUNCATED], total, limit)
    if counts[SKIPPED]:
        log.warning(
            "%s: %d of %s skipped: too long, without labels, or with two equal answers",
            *(what, counts[SKIPPED], total),
        )


def note_lines(counts: Counts) -> list[str]:
    """State how many samples have each note, the most frequent first."""
    lines = []
    for note, number in counts.most_common():
        # A few answers, such as Hello, begin with their prompt by chance.
        is_chance = note == REPEATED_PROMPT and 2 * number < counts[SEEN]
        if not is_chance and note not in (SEEN, TRUNCATED, SKIPPED, EMPTY):
            have = "has" if number == 1 else "have"
            lines.append(f"{counted(number, 'sample')} {have} {printable(note)}")
    return lines[:_NUM_NOTES]


POLICIES = ("error", "right", "skip", "history")
_NUM_SHOWN = 3
UNLIMITED = 2**31 - 1
"""A number of tokens that no sample has."""


@dataclass
class Truncation:
    """The policy for samples of more than *seq_length* tokens.

    ``error`` rejects them, ``right`` truncates them, and ``skip`` skips them, as does ``history``, with which the
    builder removes old messages before. Samples without labels are skipped, too. *counts* are the numbers of samples.
    """

    policy: str
    seq_length: int
    counts: Counts = field(default_factory=Counter, init=False)

    @classmethod
    def of(cls, policy: str, seq_length: int | None) -> Self:
        """Make the policy of a builder, where *seq_length* None is no limit."""
        return cls(policy, UNLIMITED if seq_length is None else seq_length)

    @property
    def limit(self) -> int | None:
        """The maximum tokens of a sample; None without a limit."""
        return None if self.seq_length == UNLIMITED else self.seq_length

    def __post_init__(self) -> None:
        require_choice("truncation", self.policy, POLICIES)
        # A token and the one it predicts.
        require_range("seq_length", self.seq_length, 2)

    def apply(self, samples: Sequence[TokenizedSample], where: Where) -> Samples:
        """Return the samples of a row, truncated if needed; none of them if one of them is to be skipped.

        They count as one sample. With the policy ``error``, raises :class:`RecipeError` with the location ``where()``
        for a long sample.
        """
        notes = {note for sample in samples for note in sample.notes}
        if not all(REPEATED_PROMPT in sample.notes for sample in samples):
            # One of two answers may begin with the prompt by chance.
            notes.discard(REPEATED_PROMPT)
        remaining = [self._truncated(sample, where) for sample in samples]
        self.counts.update([SEEN, *notes])
        # The first token is never predicted.
        if not all(any(sample.labelled[1:]) for sample in remaining):
            self.counts[SKIPPED] += 1
            return []
        self.counts[TRUNCATED] += any(len(sample.tokens) > self.seq_length for sample in samples)
        self.counts[EMPTY] += any(sample.is_empty for sample in samples)
        return remaining

    def _truncated(self, sample: TokenizedSample, where: Where) -> TokenizedSample:
        """Return the sample, truncated if needed; without labels if it is to be skipped."""
        if len(sample.tokens) <= self.seq_length:
            return sample
        # A sample without labels is skipped, also if it is too long.
        if self.policy == "error" and any(sample.labelled[1:]):
            raise too_long({0: len(sample.tokens)}, self.seq_length, 1, lambda _: where())
        labelled = sample.labelled[: self.seq_length] if self.policy == "right" else []
        tokens = sample.tokens[: self.seq_length]
        return TokenizedSample(tokens, labelled, number=sample.number)


def too_long(
    lengths: Mapping[int, int],
    limit: int,
    num_rows: int,
    where: Callable[[int], str],
    noun: str = "sample",
    key: str = "seq_length",
) -> RecipeError:
    """Make one error for rows of *num_rows* with a *noun* of more than *limit* tokens, the value of *key*.

    *lengths* are the numbers of these rows -> their tokens, ``where(row)`` is the location of a row.
    """
    places = [f"{where(row)} ({n} tokens)" for row, n in islice(lengths.items(), _NUM_SHOWN)]
    longest = max(lengths.values())
    return RecipeError(
        f"a {noun} is longer than {key}" if len(lengths) == 1 else f"{noun}s are longer than {key}",
        where=", ".join(places),
        value=f"{len(lengths)} of {counted(num_rows, noun)}; {key} {limit}, the longest {longest} tokens",
        hint=f"increase dataset.{key} to {longest}, set dataset.truncation right to truncate such {noun}s, or remove "
        "them",
    )


class EarlierTruncation(Truncation):
    """Counts the samples that an encoder has truncated itself, and skips samples that have lost all labels."""

    def apply(self, samples: Sequence[TokenizedSample], where: Where) -> Samples:
        [sample] = samples
        # A sample of texts with one token each has no labels either.
        is_skipped = sample.is_cut and not any(sample.labelled)
        self.counts[SEEN] += 1
        self.counts[SKIPPED] += is_skipped
        self.counts[TRUNCATED] += sample.is_cut and not is_skipped
        self.counts[EMPTY] += sample.is_empty and not is_skipped
        return [] if is_skipped else [sample]
