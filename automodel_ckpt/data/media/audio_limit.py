"""How much of an audio a processor uses: feature extractors cut long audio without an error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

_END_SECONDS = 0.05
"""Length of the end of an audio that a probe changes. The last frame of a spectrogram may be unused in any audio."""
_PRECISION_SECONDS = 0.01
_MARGIN = 1.5
"""A probe is this much longer than the audio, so that few probes are needed."""


class AudioLimit:
    """The longest audio that a processor uses as a whole, found by whether the end of an audio has an effect.

    *features_of* converts samples [length] at *sampling_rate* to a list of arrays. *declared* is the number of samples
    that the processor states as its window; None: it states none.
    """

    def __init__(
        self,
        features_of: Callable[[Any], list[Any]],
        sampling_rate: int,
        declared: int | None = None,
    ) -> None:
        self.features_of = features_of
        self.sampling_rate = sampling_rate
        self.declared = declared
        self._end = int(_END_SECONDS * sampling_rate)
        self._longest_used = 0
        self._limit: int | None = None

    def uses(self, num_samples: int) -> bool:
        """Whether the processor uses all of an audio of *num_samples*."""
        if num_samples <= self._longest_used:
            return True
        if self._limit is None:
            longer = int(num_samples * _MARGIN)
            if self._is_end_used(longer):
                self._longest_used = longer
                return True
            self._limit = self._find_limit(longer)
        return num_samples <= self._limit

    @property
    def seconds(self) -> float:
        """The length that the processor uses of an audio for which :meth:`uses` was False."""
        assert self._limit is not None
        return round(self._limit / self.sampling_rate, 1)

    def _find_limit(self, too_long: int) -> int:
        """Return the largest number of samples that is used as a whole.

        If the processor rejects audio of any length, the limit is that of the machine: the samples show the error.
        """
        declared = self.declared
        if declared is not None:
            cuts_later = not self._is_end_used(declared + self._end)
            if cuts_later and self._is_end_used(declared):
                return declared
        low, high = self._longest_used, too_long
        while high - low > _PRECISION_SECONDS * self.sampling_rate:
            middle = (low + high) // 2
            if self._is_end_used(middle):
                low = middle
            else:
                high = middle
        if low == 0:
            log.debug("the processor uses no audio of a probe")
            return sys.maxsize
        # The end that a probe changes begins before the limit.
        return low - self._end // 2

    def _is_end_used(self, num_samples: int) -> bool:
        silence = np.zeros(num_samples, np.float32)
        noise = silence.copy()
        end = noise[-self._end :]
        end[:] = np.random.default_rng(0).uniform(-0.5, 0.5, len(end))
        try:
            pairs = zip(self.features_of(silence), self.features_of(noise), strict=True)
            return any(not np.array_equal(left, right) for left, right in pairs)
        except Exception as error:  # feature extractors raise many types for what they reject
            log.debug("the processor rejects %d samples of audio: %r", num_samples, error)
            return False
