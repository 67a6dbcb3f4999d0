"""Whether a processor uses a whole audio: feature extractors cut long audio without an error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

_END_SECONDS = 0.05
"""Length of the end of an audio that a probe changes. The last frame of a spectrogram may be unused in any audio."""
_MARGIN = 1.5
"""The first probe is this much longer than the audio, so that few probes are needed."""


class AudioLimit:
    """Finds out whether a processor uses the end of an audio. *features_of* converts samples [length] to arrays."""

    def __init__(self, features_of: Callable[[Any], list[Any]], sampling_rate: int) -> None:
        self.features_of = features_of
        self._end = int(_END_SECONDS * sampling_rate)
        self._longest_used = 0
        self._shortest_cut = sys.maxsize

    def uses(self, num_samples: int) -> bool:
        """Whether the processor uses all of an audio of *num_samples*."""
        for probed in (int(num_samples * _MARGIN), num_samples):
            if self._longest_used < num_samples < self._shortest_cut and self._is_end_used(probed):
                self._longest_used = probed
        if num_samples > self._longest_used:
            self._shortest_cut = min(self._shortest_cut, num_samples)
        return num_samples <= self._longest_used

    def _is_end_used(self, num_samples: int) -> bool:
        silence = np.zeros(num_samples, np.float32)
        noise = silence.copy()
        end = noise[-self._end :]
        end[:] = np.random.default_rng(0).uniform(-0.5, 0.5, len(end))
        try:
            pairs = zip(self.features_of(silence), self.features_of(noise), strict=True)
            return any(not np.array_equal(left, right) for left, right in pairs)
        except Exception as error:  # feature extractors raise many types for what they reject
            # Not cut: the samples show the error.
            log.debug("the processor rejects %d samples of audio: %r", num_samples, error)
            return True
