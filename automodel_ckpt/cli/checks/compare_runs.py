"""Compare the records that :mod:`automodel_ckpt.training.selftest_probe` wrote after each step of two runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Step = Mapping[str, Any]
Run = Sequence[Sequence[Step]]
"""The steps of each rank: run[rank][step]."""
_NUMBERS = ("lr", "loss", "grad_norm")
_DIFFERENT = "different"


def compare(
    straight: Run, resumed: Run, stopped_after: int, tolerance: float = 0.0
) -> dict[str, Any]:
    """Return the document of ``--selftest-resume --json``.

    On the same number of ranks, all values must be bit-identical. On another number, samples and learning rates must be
    equal, and losses and gradient norms within the relative *tolerance*, unless the model has dropout: ranks draw their
    own random numbers.
    """
    is_exact = len(straight) == len(resumed)
    num_compared = len(straight) if is_exact else 1
    first = None
    steps = []
    for one, other in _steps(straight, resumed):
        for rank in range(num_compared):
            first = first or _difference(rank, one[rank], other[rank], is_exact=is_exact)
        steps.append(_summary(one, other))
    lengths = len(straight[0]), len(resumed[0])
    if first is None and lengths[0] != lengths[1]:
        first = _described(min(lengths) + 1, 0, "number of steps", *lengths)
    largest = {} if is_exact else _largest_differences(straight[0], resumed[0])
    judged = is_exact or not any(step["has_dropout"] for step in straight[0])
    verdict = "bit-identical" if is_exact else "equal within tolerance"
    if first is not None or (judged and max(largest.values(), default=0.0) > tolerance):
        verdict = _DIFFERENT
    elif not judged:
        verdict = "same samples"
    return {
        "num_steps": lengths[0],
        "stopped_after": stopped_after,
        "num_ranks": [len(straight), len(resumed)],
        "first_difference": first,
        "steps": steps,
        "largest": largest,
        "tolerance": tolerance,
        "judged": judged,
        "verdict": verdict,
    }


def is_good(document: Mapping[str, Any]) -> bool:
    """Whether the two runs of a document agree."""
    return bool(document["verdict"] != _DIFFERENT)


def _steps(straight: Run, resumed: Run) -> Iterator[tuple[Sequence[Step], Sequence[Step]]]:
    """Yield the records of all ranks for each step that both runs have."""
    return zip(zip(*straight, strict=True), zip(*resumed, strict=True), strict=False)


def _difference(rank: int, one: Step, other: Step, *, is_exact: bool) -> dict[str, Any] | None:
    """Return the first difference of a step on one rank: quantities, then whole attributes, then their tensors."""
    for name in ("samples", *_NUMBERS) if is_exact else ("samples", "lr"):
        if one[name] != other[name]:
            return _described(one["step"], rank, name, one[name], other[name])
    state, other_state = one["state"], other["state"]
    names = (state.keys() | other_state.keys()) if is_exact else ()
    for name in sorted(names, key=lambda name: ("/" not in name, name)):
        digests = [digests.get(name, "missing") for digests in (state, other_state)]
        if digests[0] != digests[1]:
            return _described(one["step"], rank, name, *digests)
    return None


def _described(step: int, rank: int, name: str, one: Any, other: Any) -> dict[str, Any]:
    texts = [repr(_number(each)) if name in _NUMBERS else str(each) for each in (one, other)]
    values = {"straight": texts[0], "resumed": texts[1]}
    return {"step": step, "rank": rank, "quantity": name, **values}


def _summary(ranks: Sequence[Step], others: Sequence[Step]) -> dict[str, Any]:
    """Return the numbers of a step, which all ranks log, the digests of its state, and whether the other run agrees."""
    step = ranks[0]
    digests = _combined(ranks)
    same_numbers = all(step[name] == others[0][name] for name in ("samples", *_NUMBERS))
    return {
        "step": step["step"],
        "num_samples": len(step["samples"]),
        **{name: _number(step[name]) for name in _NUMBERS},
        "digests": digests,
        "same": same_numbers and digests == _combined(others),
    }


def _combined(ranks: Sequence[Step]) -> dict[str, str]:
    """Return one short digest over all ranks for each attribute with state."""
    hashes: dict[str, Any] = {}
    for rank in ranks:
        for name, digest in rank["state"].items():
            found = hashes.setdefault(name.partition("/")[0], hashlib.blake2b(digest_size=6))
            found.update(f"{name} {digest}\n".encode())
    return {name: hashes[name].hexdigest() for name in sorted(hashes)}


def _largest_differences(straight: Sequence[Step], resumed: Sequence[Step]) -> dict[str, float]:
    """Return the largest relative differences; infinity if only one of two numbers is finite."""
    largest = {"loss": 0.0, "grad_norm": 0.0}
    for one, other in zip(straight, resumed, strict=False):
        for name in largest:
            a, b = _number(one[name]), _number(other[name])
            if a == b or (math.isnan(a) and math.isnan(b)):
                continue
            difference = abs(a - b) / max(abs(a), abs(b))
            if not math.isfinite(difference):
                difference = math.inf
            largest[name] = max(largest[name], difference)
    return largest


def _number(text: str) -> float:
    """Parse a number that was written with ``float.hex``, or in decimal."""
    try:
        return float.fromhex(text)
    except ValueError:
        return float(text)
