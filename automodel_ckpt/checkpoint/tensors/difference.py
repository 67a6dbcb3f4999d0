"""Differences between the tensors of two checkpoints: names, shapes and dtypes from their descriptions, and values.

If both store a tensor in the same slices with the same digests, it is equal. Its values are not read, and its bytes
only where they may have changed since the digests were recorded (:attr:`StoredTensors.recorded_at`). Any other tensor
is read in blocks: memory does not grow with the model. Imports no torch, and numpy only to compare values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.parts.slices import TensorMap, boxes, digests_of, have_same_digests
from automodel_ckpt.checkpoint.tensors.box_reader import INTEGERS, BoxReader, damage_problem
from automodel_ckpt.errors import Problem

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Stored tensors by name. The files of their slices are relative to *root*.

    *recorded_at* is the time, in nanoseconds since 1970, at which the digests were recorded, after all files had been
    written. The bytes of a file that has changed since are compared with its digests before the digests are used. By
    default, the bytes of all files are compared, because users edit the files of exports. With infinity, none are.
    """

    root: Path
    tensors: TensorMap
    recorded_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor with different values on both sides.

    *max_abs* is the largest absolute difference, and *relative* the norm of the difference divided by the norm of the
    first tensor. Both are None for dtypes that are only compared bit by bit (8-bit floats, complex).
    """

    fqn: str
    max_abs: float | None
    relative: float | None
    num_changed: int
    numel: int


@dataclass(slots=True)
class TensorDifference:
    """The differences between two sets of tensors.

    *redescribed* maps names to dtype and shape on both sides. *num_equal* counts equal tensors; of these, *num_unread*
    were equal by their digests, without reading their bytes. *damaged* maps names to the damage of tensors with bytes
    that do not match their digests. Their values are not compared. If values are not read at all, *differing* names
    the tensors with other digests, and *undecided* the tensors that are stored in other slices, because the digests of
    different slices cannot be compared.
    """

    only_first: Sequence[str] = ()
    only_second: Sequence[str] = ()
    redescribed: dict[str, tuple[str, str]] = field(default_factory=dict)
    changed: list[Change] = field(default_factory=list)
    num_equal: int = 0
    num_unread: int = 0
    damaged: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)


def compare(
    first: StoredTensors, second: StoredTensors, *, reads_values: bool = True
) -> TensorDifference:
    """Compare all tensors; without *reads_values*, only their descriptions and digests.

    Where files may have changed since their digests were recorded, their bytes are compared with the digests first.
    A file that cannot be read is damage of its tensors.
    """
    found = TensorDifference(
        sorted(first.tensors.keys() - second.tensors.keys()),
        sorted(second.tensors.keys() - first.tensors.keys()),
    )
    sides = (first, second)
    changed_files = {(side.root, file) for side in sides for file in _changed_files(side)}
    for fqn, one in first.tensors.items():
        other = second.tensors.get(fqn)
        if other is None:
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            before, after = (f"{each.dtype} {list(each.shape)}" for each in (one, other))
            found.redescribed[fqn] = (before, after)
            continue
        stored = [(first.root, one), (second.root, other)]
        is_same = have_same_digests(one, other)
        if not is_same and not reads_values:
            digests = digests_of(one), digests_of(other)
            is_known = None not in (*digests[0].values(), *digests[1].values())
            is_known = is_known and digests[0].keys() == digests[1].keys()
            (found.differing if is_known else found.undecided).append(fqn)
            continue
        if is_same:
            stored = [
                (root, tensor)
                for root, tensor in stored
                if any((root, each.file) in changed_files for each in tensor.slices)
            ]
            found.num_unread += not stored
        problems = [damage_problem(*side) for side in stored]
        if any(problems):
            found.damaged[fqn] = tuple(filter(None, problems))
        elif not is_same and (change := _change(fqn, first, second)):
            found.changed.append(change)
        else:
            found.num_equal += 1
    return found


def _changed_files(side: StoredTensors) -> set[str]:
    """Return the files that may have changed since the digests of their tensors were recorded."""
    if side.recorded_at == math.inf:
        return set()
    changed = set()
    for file in {stored.file for tensor in side.tensors.values() for stored in tensor.slices}:
        try:
            is_changed = os.stat(side.root / file).st_mtime_ns > side.recorded_at
        except OSError:
            # Reading it reports why.
            is_changed = True
        if is_changed:
            changed.add(file)
    return changed


def _change(fqn: str, first: StoredTensors, second: StoredTensors) -> Change | None:
    """Compare the values of a tensor. Returns None when all bits are equal."""
    import numpy as np

    tensor = first.tensors[fqn]
    is_measured = tensor.dtype in ORDINARY_FLOATS or tensor.dtype in INTEGERS
    one, other = (BoxReader(side.root, side.tensors[fqn]) for side in (first, second))
    num_changed = 0
    max_abs = square_of_difference = square_of_first = 0.0
    for box in boxes(tensor.shape):
        raw_one = one.read(box)
        raw_other = other.read(box)
        is_equal = raw_one.tobytes() == raw_other.tobytes()
        if not is_equal:
            num_changed += int(np.count_nonzero(raw_one != raw_other))
        if not is_measured:
            continue
        values = one.wide(raw_one)
        square_of_first += _sum_of_squares(values)
        if not is_equal:
            with np.errstate(invalid="ignore", over="ignore"):
                difference = np.abs(values - other.wide(raw_other))
            max_abs = max(max_abs, _infinite_if_nan(difference.max(initial=0.0)))
            square_of_difference += _sum_of_squares(difference)
    if num_changed == 0:
        return None
    numel = math.prod(tensor.shape)
    if not is_measured:
        return Change(fqn, None, None, num_changed, numel)
    relative = math.sqrt(square_of_difference / square_of_first) if square_of_first else math.inf
    return Change(fqn, max_abs, relative, num_changed, numel)


def _sum_of_squares(values: Array) -> float:
    import numpy as np

    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return _infinite_if_nan(np.dot(flat, flat))


def _infinite_if_nan(value: float) -> float:
    """Let NaN count as infinite, so that a tensor that became NaN is listed first."""
    return math.inf if math.isnan(value) else float(value)


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, leaf) of nested mappings and lists. An empty mapping or list is a leaf."""
    if not value or not isinstance(value, Mapping | list):
        if prefix:
            yield prefix, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))


def changed_leaves(first: Values, second: Values) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys with different values, and both values. The value of a missing key is None."""
    before = dict(flatten(first))
    after = dict(flatten(second))
    pairs = {key: (before.get(key), after.get(key)) for key in sorted({*before, *after})}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
