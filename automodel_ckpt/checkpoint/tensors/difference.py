"""Differences between the tensors of two checkpoints: names, shapes and dtypes from their descriptions, and values.

If both store a tensor in the same slices with the same digests, it is equal. Its values are not read, and its bytes
only where they may have changed since the digests were recorded (:attr:`StoredTensors.recorded_at`). Any other tensor
is read in blocks: memory does not grow with the model. Imports no torch, and numpy only to compare values.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.layout import FURTHER_BITS
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, digests_of, have_same_digests
from automodel_ckpt.checkpoint.tensors.box_reader import INTEGERS, BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.integrity import damage_problem
from automodel_ckpt.errors import Problem, os_problem

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array


_SUFFIX = f".{FURTHER_BITS}"


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Stored tensors by name. The files of their slices are relative to *root*.

    *recorded_at* is the time, in nanoseconds since 1970, at which the digests were recorded, after all files had been
    written. The bytes of a file that has changed since are compared with its digests before the digests are used. With
    None, those of all files are compared, because users edit the files of exports. With infinity, those of none are.

    *further_bits* are stored elsewhere in the checkpoint: with them, the bfloat16 tensors of the same names are float32
    values.
    """

    root: Path
    tensors: Mapping[str, Tensor]
    recorded_at: float | None = None
    further_bits: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor whose values differ.

    *max_abs* is the largest absolute difference, and *relative* the norm of the difference divided by the norm of the
    first tensor. Both are None for dtypes that are only compared bit by bit (8-bit floats, complex). With *as_float32*,
    the tensor is stored as bfloat16, and its values are float32 because both sides have its further bits.
    """

    fqn: str
    max_abs: float | None
    relative: float | None
    num_changed: int
    numel: int
    as_float32: bool = False


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The differences between two sets of tensors.

    *redescribed* maps names to dtype and shape on both sides. *num_equal* counts equal tensors; of these, *num_unread*
    were equal by their digests, without reading their bytes. *damaged* maps names to the damage of tensors whose bytes
    do not match their digests; their values are not compared. If values are not read at all, *differing* names the
    tensors with other digests, and *undecided* those that are stored in other slices, whose digests cannot be compared.

    *num_as_float32* counts the tensors that are stored as bfloat16 with further bits on both sides, and compared as
    float32. *bits_only_first* and *bits_only_second* are those with further bits on one side: their bfloat16 values are
    compared.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    redescribed: Mapping[str, tuple[str, str]]
    changed: tuple[Change, ...]
    num_equal: int
    num_unread: int
    damaged: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    num_as_float32: int = 0
    bits_only_first: tuple[str, ...] = ()
    bits_only_second: tuple[str, ...] = ()


def compare(
    first: StoredTensors, second: StoredTensors, *, reads_values: bool = True
) -> TensorDifference:
    """Compare all tensors; without *reads_values*, only their descriptions and digests.

    Where files may have changed since their digests were recorded, their bytes are compared with the digests first.
    A file that cannot be read is damage of its tensors.
    """
    redescribed: dict[str, tuple[str, str]] = {}
    changed: list[Change] = []
    damaged: dict[str, tuple[Problem, ...]] = {}
    differing: list[str] = []
    undecided: list[str] = []
    num_equal = 0
    num_unread = 0
    changed_files = {(side.root, file) for side in (first, second) for file in _changed_files(side)}
    as_float32 = first.further_bits.keys() & second.further_bits.keys()
    for fqn, one in first.tensors.items():
        other = second.tensors.get(fqn)
        if other is None:
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            redescribed[fqn] = (_description(one), _description(other))
            continue
        has_bits = fqn in as_float32
        parts = [_parts(side, fqn, with_bits=has_bits) for side in (first, second)]
        pairs = [(before, after) for (_, before), (_, after) in zip(*parts, strict=True)]
        if all(have_same_digests(*pair) for pair in pairs):
            unverified = [part for part in itertools.chain(*parts) if _is_in(changed_files, *part)]
            problems = _damage(*unverified)
            if problems:
                damaged[fqn] = problems
                continue
            num_unread += not unverified
            num_equal += 1
            continue
        if not reads_values:
            (differing if any(map(_differ_by_digest, pairs)) else undecided).append(fqn)
            continue
        problems = _damage(*itertools.chain(*parts))
        if problems:
            damaged[fqn] = problems
            continue
        change = _change(fqn, first, second, as_float32=has_bits)
        if change is None:
            num_equal += 1
        else:
            changed.append(change)
    return TensorDifference(
        tuple(sorted(first.tensors.keys() - second.tensors.keys())),
        tuple(sorted(second.tensors.keys() - first.tensors.keys())),
        redescribed,
        tuple(changed),
        num_equal,
        num_unread,
        damaged,
        tuple(differing),
        tuple(undecided),
        len(as_float32 - redescribed.keys()),
        tuple(sorted(first.further_bits.keys() - second.further_bits.keys())),
        tuple(sorted(second.further_bits.keys() - first.further_bits.keys())),
    )


def _description(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _is_in(files: Collection[tuple[Path, str]], root: Path, tensor: Tensor) -> bool:
    """Whether one of *files*, which are (root, file), has a part of *tensor*."""
    return any((root, stored.file) in files for stored in tensor.slices)


def _parts(side: StoredTensors, fqn: str, *, with_bits: bool) -> list[tuple[Path, Tensor]]:
    """Return the stored tensors of a value, each with its root: itself and, *with_bits*, its further bits."""
    tensors = [side.tensors[fqn]]
    if with_bits:
        tensors.append(side.further_bits[fqn])
    return [(side.root, tensor) for tensor in tensors]


def _changed_files(side: StoredTensors) -> set[str]:
    """Return the files that may have changed since the digests of their tensors were recorded."""
    if side.recorded_at == math.inf:
        return set()
    tensors = [*side.tensors.values(), *side.further_bits.values()]
    files = {stored.file for tensor in tensors for stored in tensor.slices}
    if side.recorded_at is None:
        return files
    changed = set()
    for file in files:
        try:
            is_changed = os.stat(side.root / file).st_mtime_ns > side.recorded_at
        except OSError:
            # Reading it reports why.
            is_changed = True
        if is_changed:
            changed.add(file)
    return changed


def _damage(*sides: tuple[Path, Tensor]) -> tuple[Problem, ...]:
    """Return the damage of the stored bytes on both sides."""
    found = []
    for root, tensor in sides:
        try:
            problem = damage_problem(root, tensor)
        except OSError as error:
            problem = os_problem(
                error,
                f"a file of the checkpoint {root.name} cannot be read",
                hint="restore the file from another copy; `ckpt verify` lists all files that are missing or damaged",
            )
        if problem is not None:
            found.append(problem)
    return tuple(found)


def _differ_by_digest(pair: tuple[Tensor, Tensor]) -> bool:
    """Whether two tensors consist of the same slices with other digests."""
    one, other = map(digests_of, pair)
    return one.keys() == other.keys() and one != other


def _change(
    fqn: str, first: StoredTensors, second: StoredTensors, *, as_float32: bool
) -> Change | None:
    """Compare the values of a tensor, *as_float32* with its further bits. Returns None if all bits are equal."""
    import numpy as np

    tensor = first.tensors[fqn]
    is_measured = tensor.dtype in ORDINARY_FLOATS or tensor.dtype in INTEGERS
    one, other = (_reader(side, fqn, as_float32=as_float32) for side in (first, second))
    num_changed = 0
    max_abs = 0.0
    square_of_difference = 0.0
    square_of_first = 0.0
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
            max_abs = max(max_abs, _largest(difference))
            square_of_difference += _sum_of_squares(difference)
    if num_changed == 0:
        return None
    numel = math.prod(tensor.shape)
    if not is_measured:
        return Change(fqn, None, None, num_changed, numel, as_float32)
    relative = math.inf
    if square_of_first:
        relative = math.sqrt(square_of_difference / square_of_first)
    return Change(fqn, max_abs, relative, num_changed, numel, as_float32)


def _reader(side: StoredTensors, fqn: str, *, as_float32: bool) -> BoxReader | Float32Reader:
    if as_float32:
        return Float32Reader(side.root, side.tensors[fqn], side.further_bits[fqn])
    return BoxReader(side.root, side.tensors[fqn])


def _largest(values: Array) -> float:
    """Return the largest value. NaN counts as infinite, so that a tensor that became NaN is listed first."""
    largest = float(values.max(initial=0.0))
    if math.isnan(largest):
        return math.inf
    return largest


def _sum_of_squares(values: Array) -> float:
    import numpy as np

    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(flat, flat))
    if math.isnan(total):
        return math.inf
    return total


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, leaf) of nested mappings and lists. An empty mapping or list is a leaf."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    is_leaf = True
    for key, item in items:
        is_leaf = False
        yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    if is_leaf:
        yield prefix, value


def changed_leaves(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ, with both values. The value of a missing key is None."""
    before = dict(flatten(first))
    after = dict(flatten(second))
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *after}):
        pair = (before.get(key), after.get(key))
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def further_bits_of(
    trees: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, dict[str, tuple[str, str]]]:
    """Find the further bits of weights among the tensors of a checkpoint, which *trees* maps by tree and name.

    Returns, for each tree with such weights, the name of each weight with the tree and the name of its further bits.
    """
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for owner, tensors in trees.items():
        prefix = f"{owner}.state."
        for name, bits in tensors.items():
            if not (name.startswith(prefix) and name.endswith(_SUFFIX)):
                continue
            parameter = name.removeprefix(prefix).removesuffix(_SUFFIX)
            for module, weights in trees.items():
                # Optimizers name a parameter by its module, in which dots are replaced, and its name there.
                fqn = parameter.removeprefix(f"{module.replace('.', '%')}.")
                weight = weights.get(fqn) if fqn != parameter else None
                if weight is not None and _continues(weight, bits):
                    found.setdefault(module, {})[fqn] = (owner, name)
    return found


def _continues(weight: Tensor, bits: Tensor) -> bool:
    return (weight.dtype, bits.dtype) == ("BF16", "I16") and weight.shape == bits.shape


class Float32Reader:
    """Reads boxes of float32 weights as raw bits, as :class:`BoxReader` does. Files are relative to *root*."""

    def __init__(self, root: Path, rounded: Tensor, further_bits: Tensor) -> None:
        self._rounded = BoxReader(root, rounded)
        self._further_bits = BoxReader(root, further_bits)

    def read(self, box: Box) -> Array:
        """Return the values in *box* as unsigned integers of 32 bits."""
        import numpy as np

        high = self._rounded.read(box).astype(np.int32) << 16
        bits = self._further_bits.read(box).view(np.int16).astype(np.int32)
        # As in training: a weight of 0 has no negative bits.
        bits = np.where(high << 1 == 0, np.maximum(bits, 0), bits)
        return (high + bits).view(np.uint32)

    def wide(self, raw: Array) -> Array:
        """Convert raw bits to double precision."""
        import numpy as np

        return raw.view(np.float32).astype(np.float64)
