"""How the tensors of two checkpoints differ: by name, shape and dtype from their descriptions, by value in blocks.

Where both hold a tensor in the same slices, slices of equal digests are equal and are not read. All else is read once,
a block at a time: memory does not grow with the model. Imports no torch, and numpy only where values are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.tensors.box_reader import INTEGERS, BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.integrity import damage_problem
from automodel_ckpt.errors import Problem

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors by name, their files relative to *root*."""

    root: Path
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor whose values differ: by how much at most, the norm of the difference over that of the first one's
    values, and in how many elements. *max_abs* and *relative* are None for dtypes without arithmetic here (fp8,
    complex)."""

    fqn: str
    max_abs: float | None
    relative: float | None
    num_changed: int
    numel: int


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """*redescribed* gives dtype and shape on both sides, *unread* counts tensors that digests showed to be equal.
    *damaged* says of each tensor whose stored bytes have not their digests what is wrong; its values are not compared.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    redescribed: Mapping[str, tuple[str, str]]
    changed: tuple[Change, ...]
    num_equal: int
    num_unread: int
    damaged: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)


def compare(first: Held, second: Held) -> TensorDifference:
    """Compare all tensors. Raises OSError where a file cannot be read, naming it."""
    redescribed, changed, damaged, equal, unread = {}, [], {}, 0, 0
    for fqn, one in first.tensors.items():
        other = second.tensors.get(fqn)
        if other is None:
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            redescribed[fqn] = (
                f"{one.dtype} {list(one.shape)}",
                f"{other.dtype} {list(other.shape)}",
            )
        elif _same_digests(one, other):
            unread += 1
        elif problems := _damage((first.root, one), (second.root, other)):
            damaged[fqn] = problems
        elif (change := _change(fqn, (first.root, one), (second.root, other))) is None:
            equal += 1
        else:
            changed.append(change)
    return TensorDifference(
        tuple(sorted(first.tensors.keys() - second.tensors.keys())),
        tuple(sorted(second.tensors.keys() - first.tensors.keys())),
        redescribed,
        tuple(changed),
        equal + unread,
        unread,
        damaged,
    )


def _damage(*sides: tuple[Path, Tensor]) -> tuple[Problem, ...]:
    """What is wrong with the stored bytes on either side."""
    found = (damage_problem(root, tensor) for root, tensor in sides)
    return tuple(problem for problem in found if problem is not None)


def _same_digests(one: Tensor, other: Tensor) -> bool:
    """Whether both are made of the same slices with the same digests."""
    a, b = (
        {(piece.offsets, piece.sizes): piece.digest for piece in tensor.slices}
        for tensor in (one, other)
    )
    return a == b and None not in a.values()


def _change(fqn: str, first: tuple[Path, Tensor], second: tuple[Path, Tensor]) -> Change | None:
    import numpy as np

    tensor = first[1]
    numel, changed, worst, difference, norm = math.prod(tensor.shape), 0, 0.0, 0.0, 0.0
    measured = tensor.dtype in ORDINARY_FLOATS or tensor.dtype in INTEGERS
    one, other = BoxReader(*first), BoxReader(*second)
    for box in boxes(tensor.shape):
        a, b = one.read(box), other.read(box)
        if a.tobytes() == b.tobytes():
            norm += _square(one.wide(a)) if measured else 0.0
            continue
        changed += int(np.count_nonzero(a != b))
        if measured:
            with np.errstate(invalid="ignore", over="ignore"):
                x, y = one.wide(a), other.wide(b)
                gap = np.abs(x - y)
            worst, difference, norm = (
                max(worst, _largest(gap)),
                difference + _square(gap),
                norm + _square(x),
            )
    if not changed:
        return None
    relative = math.sqrt(difference / norm) if norm else math.inf
    return Change(fqn, worst if measured else None, relative if measured else None, changed, numel)


def _largest(gap: Array) -> float:
    """The largest value; infinite where one is no number, so that a tensor that turned into NaN stands on top."""
    largest = float(gap.max(initial=0.0))
    return math.inf if math.isnan(largest) else largest


def _square(values: Array) -> float:
    import numpy as np

    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(flat, flat))
    return math.inf if math.isnan(total) else total


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf) of nested mappings and lists; an empty one is a leaf."""
    pairs = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in pairs]
    if not found:
        yield prefix, value
    for key, item in found:
        yield from flatten(item, key)


def changed_leaves(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ, with both values; None where a side lacks the key."""
    a, b = dict(flatten(first)), dict(flatten(second))
    keys = sorted({*a, *b})
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}
