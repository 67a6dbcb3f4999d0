"""How long the samples of a data set are, in one line for the log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automodel_ckpt.base.units import counted


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
