"""Compare the records that :mod:`automodel_ckpt.training.selftest_probe` wrote after each step of two runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Step = Mapping[str, Any]
Run = Sequence[Sequence[Step]]
"""The steps of each rank: run[rank][step]."""
NUMBERS = ("lr", "loss", "grad_norm")
QUANTITIES = ("samples", *NUMBERS)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs: both values as text, numbers in decimal."""

    step: int
    rank: int
    quantity: str
    straight: str
    resumed: str

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}, {self.quantity}: straight {self.straight}, resumed {self.resumed}"


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step of the uninterrupted run: *digests* of each attribute over all ranks, and whether the other run agrees."""

    step: int
    num_samples: int
    loss: float
    grad_norm: float
    lr: float
    digests: Mapping[str, str]
    same: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two runs.

    *largest* holds the largest relative differences of loss and gradient norm if the number of ranks changed. *judged*
    is False if the model has dropout, so that they cannot be compared.
    """

    num_steps: int
    stopped_after: int
    num_ranks: tuple[int, int]
    first_difference: Difference | None
    steps: Sequence[StepSummary]
    largest: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = 0.0
    judged: bool = True

    @property
    def is_good(self) -> bool:
        """Whether the runs are bit-identical, or, on different numbers of ranks, equal within the tolerance."""
        within = all(value <= self.tolerance for value in self.largest.values())
        return self.first_difference is None and (within or not self.judged)

    @property
    def verdict(self) -> str:
        """The result in words: bit-identical, equal within tolerance, same samples, or different."""
        if not self.is_good:
            return "different"
        if self.num_ranks[0] == self.num_ranks[1]:
            return "bit-identical"
        return "equal within tolerance" if self.judged else "same samples"

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--selftest-resume --json``."""
        return {**asdict(self), "verdict": self.verdict}


def compare_exactly(straight: Run, resumed: Run, stopped_after: int) -> Comparison:
    """Compare two runs on the same number of ranks: all values must be bit-identical."""
    first = _first_difference(straight, resumed) or _length_difference(straight, resumed)
    ranks = (len(straight), len(resumed))
    steps = _summaries(straight, resumed)
    return Comparison(len(straight[0]), stopped_after, ranks, first, steps)


def compare_loosely(
    straight: Run, resumed: Run, stopped_after: int, tolerance: float
) -> Comparison:
    """Compare two runs on different numbers of ranks.

    Samples and learning rates must be equal, losses and gradient norms within the relative *tolerance*.
    """
    pairs = list(zip(straight[0], resumed[0], strict=False))
    first: Difference | None = None
    largest = {"loss": 0.0, "grad_norm": 0.0}
    for one, other in pairs:
        if first is None:
            first = next(_quantity_differences(0, one, other, ("samples", "lr")), None)
        for name in largest:
            difference = _relative_difference(one[name], other[name])
            largest[name] = max(largest[name], difference)
    first = first or _length_difference(straight, resumed)
    # Ranks draw their own random numbers, so another number of ranks has other dropout masks.
    judged = not any(step["has_dropout"] for step in straight[0])
    ranks = (len(straight), len(resumed))
    steps = _summaries(straight, resumed)
    return Comparison(
        len(straight[0]), stopped_after, ranks, first, steps, largest, tolerance, judged
    )


def _first_difference(straight: Run, resumed: Run) -> Difference | None:
    """Return the first difference between two runs on the same number of ranks: by step, then by rank."""
    straight_steps = zip(*straight, strict=True)
    resumed_steps = zip(*resumed, strict=True)
    for ranks, other_ranks in zip(straight_steps, resumed_steps, strict=False):
        for rank, (one, other) in enumerate(zip(ranks, other_ranks, strict=True)):
            for difference in _differences(rank, one, other):
                return difference
    return None


def _quantity_differences(
    rank: int, one: Step, other: Step, names: Sequence[str]
) -> Iterator[Difference]:
    for name in names:
        if one[name] != other[name]:
            before, after = _text(name, one[name]), _text(name, other[name])
            yield Difference(one["step"], rank, name, before, after)


def _differences(rank: int, one: Step, other: Step) -> Iterator[Difference]:
    """Yield the differences of a step on one rank: quantities first, then whole attributes, then their tensors."""
    yield from _quantity_differences(rank, one, other, QUANTITIES)
    state, other_state = one["state"], other["state"]
    names = state.keys() | other_state.keys()
    for name in sorted(names, key=lambda name: ("/" not in name, name)):
        digest = state.get(name, "missing")
        other_digest = other_state.get(name, "missing")
        if digest != other_digest:
            yield Difference(one["step"], rank, name, digest, other_digest)


def _summaries(straight: Run, resumed: Run) -> list[StepSummary]:
    summaries = []
    straight_steps = zip(*straight, strict=True)
    resumed_steps = zip(*resumed, strict=True)
    for one, other in zip(straight_steps, resumed_steps, strict=False):
        # All ranks log the same numbers; the digests of their states differ.
        step = one[0]
        digests = _combined(one)
        same_state = digests == _combined(other)
        same_numbers = all(step[name] == other[0][name] for name in QUANTITIES)
        numbers = {name: _number(step[name]) for name in NUMBERS}
        summary = StepSummary(
            step["step"],
            len(step["samples"]),
            digests=digests,
            same=same_state and same_numbers,
            **numbers,
        )
        summaries.append(summary)
    return summaries


def _combined(ranks: Sequence[Step]) -> dict[str, str]:
    """Return one short digest over all ranks for each attribute with state."""
    hashes: dict[str, Any] = {}
    for rank in ranks:
        for name, digest in rank["state"].items():
            attribute = name.partition("/")[0]
            if attribute not in hashes:
                hashes[attribute] = hashlib.blake2b(digest_size=6)
            hashes[attribute].update(f"{name} {digest}\n".encode())
    return {name: hashes[name].hexdigest() for name in sorted(hashes)}


def _length_difference(straight: Run, resumed: Run) -> Difference | None:
    lengths = len(straight[0]), len(resumed[0])
    if lengths[0] == lengths[1]:
        return None
    return Difference(min(lengths) + 1, 0, "number of steps", str(lengths[0]), str(lengths[1]))


def _text(name: str, value: Any) -> str:
    return repr(_number(value)) if name in NUMBERS else str(value)


def _number(text: str) -> float:
    """Parse a number that was written with ``float.hex``, or in decimal."""
    try:
        return float.fromhex(text)
    except ValueError:
        return float(text)


def _relative_difference(one: str, other: str) -> float:
    """Return the difference relative to the larger number; 0 for two NaN, infinity if only one is finite."""
    a, b = _number(one), _number(other)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    # Not 0: the numbers are different.
    larger = max(abs(a), abs(b))
    difference = abs(a - b) / larger
    return difference if math.isfinite(difference) else math.inf
