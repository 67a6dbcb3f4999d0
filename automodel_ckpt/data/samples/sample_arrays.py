"""Samples of different lengths in flat arrays, which are files of a cache, and a summary of their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from automodel_ckpt.base.units import counted


class SampleArrays:
    """Samples that are concatenated: sample i has the elements ``ends[i - 1]`` to ``ends[i]`` of the long arrays.

    A subclass names its attributes with arrays in :attr:`array_names`, in the order of the arguments of its class.
    """

    array_names: ClassVar[Sequence[str]]
    ends: npt.NDArray[np.int64]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load the samples that :meth:`save` wrote; the arrays are memory-mapped."""
        return cls(*cls.mapped_arrays(directory))

    @classmethod
    def mapped_arrays(cls, directory: Path) -> list[npt.NDArray[Any]]:
        """Map the arrays of :attr:`array_names` in a directory."""
        arrays: list[npt.NDArray[Any]] = []
        for name in cls.array_names:
            # np.load rejects pickled objects by default: a cache that others can write must not run code.
            mapped = np.load(directory / f"{name}.npy", mmap_mode="r")
            # A plain array over the mapping: numpy's memmap class takes ten times as long to slice.
            arrays.append(np.asarray(mapped))
        return arrays

    def save(self, directory: Path) -> None:
        """Write the arrays as ``.npy`` files into an existing directory."""
        for name in self.array_names:
            np.save(directory / f"{name}.npy", getattr(self, name))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of elements of each sample."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, index: int) -> slice:
        """The elements of sample *index*. Raises IndexError if there is none with this index."""
        # IndexError also ends an iteration over a class without __iter__.
        if not 0 <= index < len(self.ends):
            raise IndexError(index)
        start = int(self.ends[index - 1]) if index else 0
        return slice(start, int(self.ends[index]))


@dataclass(frozen=True, slots=True)
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
    def of(cls, lengths: npt.NDArray[np.int64], num_labels: int | None) -> LengthSummary:
        """Summarize *lengths*, the number of tokens of each sample."""
        if not len(lengths):
            return cls(0, 0, 0, 0, 0, 0)
        # A length that occurs, not a mean of two.
        median, percentile_99 = np.percentile(lengths, [50, 99], method="higher").astype(int)
        return cls(
            len(lengths),
            int(median),
            int(percentile_99),
            int(lengths.max()),
            int(lengths.sum()),
            num_labels,
        )

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
