"""The formulas that combine the tensors of several checkpoints into one, block by block. Imports no torch.

Notation: x_i is a tensor of source i, w_i its weight (the weights sum to 1), b the same tensor of the base, and
d_i = x_i - b. A method is created for one tensor and gets the blocks of all sources. Where a formula needs a property
of the whole tensor (an angle, a threshold), the method reads the tensor once more before, so that no more than a block
per source is in memory.

Arithmetic is in float32; in float64 for tensors of float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import xxhash

from automodel_ckpt.checkpoint.tensors.float_cast import Array

Blocks = Callable[[], Iterator[Array]]
"""Starts a pass over a tensor: its consecutive blocks of shape [N], in float32 or float64."""

# Two vectors are treated as parallel above this cosine: the formula of slerp divides by the sine of their angle.
_PARALLEL = 0.9995
_HALF_BITS = 16


class Method(ABC):
    """Combines one tensor of several sources. *fqn* is its name, *density* and *scale* are options of some methods."""

    needs_base: ClassVar[bool] = False
    """Whether the method works on differences to a base."""

    def __init__(
        self,
        fqn: str,
        weights: Sequence[float],
        *,
        density: float = 1.0,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._fqn = fqn
        self._weights = list(weights)
        self._density = density
        self._scale = scale
        self._seed = seed

    def prepare(self, sources: Sequence[Blocks], base: Blocks | None, numel: int) -> None:
        """Compute what depends on the whole tensor of *numel* elements. Called once, before :meth:`combine`."""
        return

    @abstractmethod
    def combine(self, values: Sequence[Array], base: Array | None) -> Array:
        """Return one block of the result from the blocks of the sources. Called with the blocks in their order."""


class Linear(Method):
    """The weighted mean: sum of w_i x_i."""

    def combine(self, values: Sequence[Array], base: Array | None) -> Array:
        return _weighted_sum(values, self._weights)


class Slerp(Method):
    """Spherical linear interpolation between two sources (Shoemake, 1985).

    With t = w_2 and the angle a between x_1 and x_2, both taken as vectors:
    sin((1 - t) a) / sin(a) x_1 + sin(t a) / sin(a) x_2. Nearly parallel vectors, and zero, are combined linearly.
    """

    def prepare(self, sources: Sequence[Blocks], base: Blocks | None, numel: int) -> None:
        first, second = sources
        product = 0.0
        squares = [0.0, 0.0]
        for one, other in zip(first(), second(), strict=True):
            wide_one = one.astype(np.float64)
            wide_other = other.astype(np.float64)
            product += float(np.dot(wide_one, wide_other))
            squares[0] += float(np.dot(wide_one, wide_one))
            squares[1] += float(np.dot(wide_other, wide_other))
        norms = math.sqrt(squares[0]) * math.sqrt(squares[1])
        if not norms or not math.isfinite(norms):
            return
        cosine = max(-1.0, min(1.0, product / norms))
        if abs(cosine) > _PARALLEL:
            return
        angle = math.acos(cosine)
        # The weights of this tensor, which do not sum to 1 any more.
        self._weights = [math.sin(weight * angle) / math.sin(angle) for weight in self._weights]

    def combine(self, values: Sequence[Array], base: Array | None) -> Array:
        return _weighted_sum(values, self._weights)


class Ties(Method):
    """TIES merging (Yadav et al., 2023, arXiv:2306.01708): trim, elect a sign, average the differences that agree.

    The int(density * numel) elements of each d_i with the largest magnitude are kept (and those equal to the smallest
    of them), the others become 0. The sign of an element is that of sum w_i d_i. The result is
    b + scale * (sum of w_i d_i over the sources with this sign) / (sum of their w_i).
    """

    needs_base = True

    def prepare(self, sources: Sequence[Blocks], base: Blocks | None, numel: int) -> None:
        assert base is not None
        num_kept = max(1, int(self._density * numel))
        self._thresholds: list[np.uint32] = []
        for source in sources:
            self._thresholds.append(_threshold(source, base, num_kept))

    def combine(self, values: Sequence[Array], base: Array | None) -> Array:
        assert base is not None
        trimmed: list[Array] = []
        for value, threshold in zip(values, self._thresholds, strict=True):
            difference = value - base
            difference[_magnitude_bits(difference) < threshold] = 0
            trimmed.append(difference)
        elected = np.sign(_weighted_sum(trimmed, self._weights))
        total = np.zeros_like(base)
        total_weight = np.zeros_like(base)
        for difference, weight in zip(trimmed, self._weights, strict=True):
            agrees = (np.sign(difference) == elected) & (difference != 0)
            factor = agrees.astype(base.dtype) * base.dtype.type(weight)
            total += factor * difference
            total_weight += factor
        np.divide(total, total_weight, out=total, where=total_weight != 0)
        result: Array = base + base.dtype.type(self._scale) * total
        return result


class Dare(Method):
    """DARE (Yu et al., 2023, arXiv:2311.03099): drop elements of the differences at random, and rescale the others.

    The result is b + scale * sum of w_i m_i d_i / density, where m_i is 1 with probability *density* and otherwise 0.
    The random numbers depend only on the seed, the tensor's name and the position of the source.
    """

    needs_base = True

    def prepare(self, sources: Sequence[Blocks], base: Blocks | None, numel: int) -> None:
        self._generators: list[np.random.Generator] = []
        for position in range(len(sources)):
            key = xxhash.xxh3_128_intdigest(f"{self._seed} {position} {self._fqn}".encode())
            self._generators.append(np.random.Generator(np.random.Philox(key=key)))

    def combine(self, values: Sequence[Array], base: Array | None) -> Array:
        assert base is not None
        differences: list[Array] = []
        for value, generator in zip(values, self._generators, strict=True):
            is_kept = generator.random(value.shape, np.float32) < self._density
            differences.append((value - base) * is_kept)
        total = _weighted_sum(differences, self._weights)
        result: Array = base + base.dtype.type(self._scale / self._density) * total
        return result


METHODS: dict[str, type[Method]] = {"linear": Linear, "slerp": Slerp, "ties": Ties, "dare": Dare}
"""The methods of ``ckpt average --method``, by name."""


def ema_weights(decay: float, count: int) -> list[float]:
    """Return the weights of an exponential moving average over *count* sources, the oldest first.

    They are those of m_1 = x_1, m_i = decay * m_(i-1) + (1 - decay) * x_i.
    """
    weights = [decay ** (count - 1)]
    for position in range(1, count):
        weights.append((1 - decay) * decay ** (count - 1 - position))
    return weights


def _weighted_sum(values: Sequence[Array], weights: Sequence[float]) -> Array:
    total = np.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total += value.dtype.type(weight) * value
    return total


def _magnitude_bits(values: Array) -> Array:
    """Return the bits of the absolute values in float32, as integers in the same order."""
    magnitudes = np.abs(values.astype(np.float32))
    bits: Array = magnitudes.view(np.uint32)
    return bits


def _threshold(source: Blocks, base: Blocks, num_kept: int) -> np.uint32:
    """Return the bits of the *num_kept*-th largest magnitude of the differences to *base*, in two passes.

    The first pass counts the upper halves of the bits, the second the lower halves of those with the upper half that
    the result has. So the result is exact, and memory does not grow with the tensor.
    """
    half_bits = np.uint32(_HALF_BITS)
    num_bins = 1 << _HALF_BITS
    lower_mask = np.uint32(num_bins - 1)
    counts = np.zeros(num_bins, np.int64)
    for value, start in zip(source(), base(), strict=True):
        bits = _magnitude_bits(value - start)
        counts += np.bincount(bits >> half_bits, minlength=num_bins)
    upper_half, num_above = _bin_of(counts, num_kept)
    counts = np.zeros(num_bins, np.int64)
    for value, start in zip(source(), base(), strict=True):
        bits = _magnitude_bits(value - start)
        in_bin = bits[(bits >> half_bits) == upper_half]
        counts += np.bincount(in_bin & lower_mask, minlength=num_bins)
    lower_half, _ = _bin_of(counts, num_kept - num_above)
    return np.uint32(upper_half << _HALF_BITS | lower_half)


def _bin_of(counts: Array, rank: int) -> tuple[int, int]:
    """Return the bin that contains the *rank*-th largest element, and the number of elements in the bins above it."""
    num_above = 0
    for number in range(len(counts) - 1, -1, -1):
        if num_above + counts[number] >= rank:
            return number, num_above
        num_above += int(counts[number])
    return 0, num_above
