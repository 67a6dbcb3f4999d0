"""The state of the optimizer in checkpoints of DeepSpeed: moments as slices, steps, and the options of groups.

DeepSpeed's optimizer trains one flat vector for each group of parameters (with ZeRO stage 3: each subgroup) and each
rank. Its state dict therefore numbers these vectors, not the parameters, and a moment has the layout of the vector
(source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, 0.19). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.sources.source import unusable
from automodel_ckpt.convert.formats.deepspeed.deepspeed_files import Partition, Shape, StateFile
from automodel_ckpt.convert.formats.deepspeed.deepspeed_partitions import (
    ParameterSet,
    add_parameters,
)
from automodel_ckpt.convert.formats.deepspeed.deepspeed_universal import UniversalDirectory
from automodel_ckpt.convert.formats.torch.flat_vector import Segment
from automodel_ckpt.convert.formats.torch.plain_values import plain_values
from automodel_ckpt.convert.formats.torch.torch_files import faults_of
from automodel_ckpt.convert.formats.torch.torch_objects import StoredView
from automodel_ckpt.convert.formats.torch.training_state import OptimizerState, ParameterGroup

# The key of the state dict that the optimizer within DeepSpeed's has: with stages 1 and 2, and with stage 3.
_STATE_KEYS = ("base_optimizer_state", "optimizer_state_dict")
_SHARED_STEP = "base_optimizer_state_step"
_STEP = "step"
_PARAMS = "params"

Groups = list[dict[str, Shape]]
Number = int | float | bool


@dataclass(frozen=True, slots=True)
class _RankState:
    """The optimizer's state of one rank: the entries of each flat vector, and the parameter groups as stored."""

    entries: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]


def partitioned_optimizer(
    tag: Path, groups: Groups, partitions: Mapping[int, Partition], names: Mapping[str, str]
) -> OptimizerState:
    """Return the optimizer's state in the files of the ranks.

    *groups* are the shapes of the parameters by flat vector, in the order of the files. *names* maps their names to
    those of the model. Raises :class:`CheckpointUnusable` if the ranks disagree or a moment has not the size of the
    parameters.
    """
    states: dict[int, _RankState] = {}
    for rank, partition in partitions.items():
        states[rank] = _rank_state(partition)
    first = states[0]
    tensors: dict[str, dict[str, Tensor]] = {}
    for entry in _tensor_entries(first):
        moments: dict[int, Partition] = {}
        for rank, partition in partitions.items():
            moments[rank] = _moment(partition, states[rank], entry)
        found = ParameterSet(partitions[0].file.path)
        add_parameters(found, groups, moments)
        for fqn, tensor in found.tensors.items():
            tensors.setdefault(names[fqn], {})[entry] = _renamed(tensor, names[fqn])
    values: dict[str, dict[str, Number]] = {}
    for index, shapes in enumerate(groups):
        numbers = _numbers(partitions[0].file, first.entries[index])
        for fqn in shapes:
            values[names[fqn]] = dict(numbers)
    return OptimizerState(
        tag,
        tensors,
        values,
        _parameter_groups(partitions[0].file, first.groups, groups, names),
    )


def universal_optimizer(
    tag: Path, groups: Groups, names: Mapping[str, str]
) -> OptimizerState | None:
    """Return the optimizer's state in a universal checkpoint; None if it has no moments.

    *groups* are the shapes of the trained parameters. *names* maps their names to those of the model.
    """
    zero = UniversalDirectory(tag)
    file = zero.optimizer()
    state = file.value if file is not None and isinstance(file.value, dict) else {}
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Number]] = {}
    for index, shapes in enumerate(groups):
        # Converted from stage 3, the step is only in the state dict of the flat vectors.
        shared = _universal_numbers(file, state, index)
        for fqn, shape in shapes.items():
            name = names[fqn]
            values[name] = dict(shared)
            for entry in zero.entries(fqn):
                if zero.has_number(fqn, entry):
                    values[name][entry] = zero.number(fqn, entry)
                    continue
                moment = zero.tensor(fqn, shape, entry)
                tensors.setdefault(name, {})[entry] = _renamed(moment, name)
    if not tensors:
        return None
    stored = state.get("param_groups")
    option_groups = tuple(group for group in stored or () if isinstance(group, dict))
    parameter_groups = _parameter_groups(file, option_groups, groups, names)
    return OptimizerState(tag, tensors, values, parameter_groups)


# ---------------------------------------------------------------- one rank


def _rank_state(partition: Partition) -> _RankState:
    """Return the optimizer's state in a rank's file. Its flat vectors are numbered from 0."""
    file = partition.file
    outer = file.mapping("optimizer_state_dict")
    state: Any = None
    for key in _STATE_KEYS:
        state = outer.get(key) if state is None else state
    if isinstance(state, list):
        # With elastic checkpoints: the entries of each vector, and no groups.
        shared = {_STEP: outer[_SHARED_STEP]} if _SHARED_STEP in outer else {}
        entries = tuple(shared | entry for entry in state if isinstance(entry, dict))
        _check_count(partition, len(entries))
        return _RankState(entries, ())
    if not isinstance(state, dict):
        what = "the file has no state of the optimizer"
        raise unusable(what, file.path, ", ".join(_STATE_KEYS))
    by_number = file.mapping("state", state)
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise unusable("the optimizer's state has no groups", file.path, type(groups).__name__)
    _check_count(partition, len(by_number))
    found: list[Mapping[str, Any]] = []
    for number in range(len(by_number)):
        entry = by_number.get(number)
        if not isinstance(entry, dict):
            what = f"the optimizer's state of flat vector {number} is missing"
            raise unusable(what, file.path, type(entry).__name__)
        found.append(_shared_step(groups, number) | entry)
    return _RankState(tuple(found), tuple(groups))


def _shared_step(groups: list[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """Return the step that the group of a flat vector counts, as DeepSpeed's FusedAdam does."""
    for group in groups:
        members = group.get(_PARAMS)
        if isinstance(members, list) and number in members and type(group.get(_STEP)) is int:
            return {_STEP: group[_STEP]}
    return {}


def _check_count(partition: Partition, count: int) -> None:
    if count != len(partition.segments):
        what = "the optimizer's state is of another number of flat vectors than the weights"
        raise unusable(what, partition.file.path, f"{count}, not {len(partition.segments)}")


def _tensor_entries(state: _RankState) -> list[str]:
    """Return the names of the entries that are tensors with elements for each parameter, such as ``exp_avg``."""
    found: list[str] = []
    for entry in state.entries:
        for key, value in entry.items():
            if isinstance(value, StoredView) and value.shape and key not in found:
                found.append(key)
    return found


def _moment(partition: Partition, state: _RankState, entry: str) -> Partition:
    """Return the rank's partition with the segments of a moment in place of those of the weights."""
    segments: list[Segment] = []
    for index, (weights, entries) in enumerate(zip(partition.segments, state.entries, strict=True)):
        what = f"{entry} of flat vector {index}"
        segment = partition.file.segment(what, entries.get(entry))
        # The padding at the end is stored with the moments, and not with the weights.
        if segment.num_elements < weights.num_elements:
            value = f"{segment.num_elements} elements, not {weights.num_elements}"
            raise unusable(f"{what} has not the size of the weights", partition.file.path, value)
        segments.append(replace(segment, num_elements=weights.num_elements))
    return replace(partition, segments=tuple(segments))


def _numbers(file: StateFile, entries: Mapping[str, Any]) -> dict[str, Number]:
    """Return the entries of a flat vector that are numbers, such as ``step``."""
    found: dict[str, Number] = {}
    for key, value in entries.items():
        is_number = isinstance(value, StoredView) and not value.shape
        if is_number or type(value) in (int, float, bool):
            found[key] = file.number(key, value)
    return found


# ---------------------------------------------------------------- groups


def _parameter_groups(
    file: StateFile | None,
    stored: tuple[Mapping[str, Any], ...],
    groups: Groups,
    names: Mapping[str, str],
) -> tuple[ParameterGroup, ...]:
    """Return the parameters of each group with its options.

    A stored group lists its flat vectors by number. Without stored groups, each vector is a group without options.
    """
    if not stored or file is None:
        return tuple(ParameterGroup(tuple(names[fqn] for fqn in shapes), {}) for shapes in groups)
    found: list[ParameterGroup] = []
    used: list[int] = []
    for group in stored:
        numbers = group.get(_PARAMS)
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            what = "a group of parameters does not list them"
            raise unusable(what, file.path, repr(numbers)[:200])
        if not all(0 <= number < len(groups) for number in numbers):
            what = "a group of parameters names a flat vector that does not exist"
            raise unusable(what, file.path, repr(numbers)[:200])
        used += numbers
        members: list[str] = []
        for number in numbers:
            members += [names[fqn] for fqn in groups[number]]
        with faults_of(file.path):
            options = plain_values(group)
        del options[_PARAMS]
        # Some optimizers count the steps in the group. That is state (see _numbers), not an option.
        options.pop(_STEP, None)
        found.append(ParameterGroup(tuple(members), options))
    if sorted(used) != list(range(len(groups))):
        what = "the groups of parameters do not have each flat vector once"
        raise unusable(what, file.path, repr(used)[:200])
    return tuple(found)


def _universal_numbers(
    file: StateFile | None, state: Mapping[Any, Any], index: int
) -> dict[str, Number]:
    """Return the numbers of flat vector *index* in the file of a universal checkpoint, if it has them."""
    inner = state.get("optimizer_state_dict")
    entries = inner.get("state") if isinstance(inner, dict) else None
    entry = entries.get(index) if isinstance(entries, dict) else None
    if file is None or not isinstance(entry, dict):
        return {}
    return _numbers(file, entry)


def _renamed(tensor: Tensor, name: str) -> Tensor:
    slices: list[Slice] = []
    for stored in tensor.slices:
        slices.append(replace(stored, fqn=name))
    return Tensor(name, tensor.dtype, tensor.shape, tuple(slices))
