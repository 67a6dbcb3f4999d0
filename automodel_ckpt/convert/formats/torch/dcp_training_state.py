"""The training state in a directory of PyTorch DCP: optimizer by FQN, counters and the LR schedule. Imports no torch.

Programs save the state dict of an optimizer with the names of its parameters, in one of two forms
(source: torch.distributed.checkpoint.state_dict, torch 2.13):

* nested, as ``get_optimizer_state_dict`` returns it: ``state`` -> FQN -> entry, and ``param_groups``, a list of
  mappings with the FQNs under ``params``;
* flattened, with ``StateDictOptions(flatten_optimizer_state_dict=True)``: the keys ``state.FQN.ENTRY`` and
  ``param_groups.FQN.OPTION``, as torchtitan and NeMo AutoModel save it.

DCP flattens both to names in ``.metadata``, which also has the path of keys of each name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import unusable
from automodel_ckpt.convert.formats.format import Counters
from automodel_ckpt.convert.formats.torch.dcp_directory import (
    DcpContent,
    Described,
    Item,
    read_tensors,
    read_values,
)
from automodel_ckpt.convert.formats.torch.nested_state import OPTIMIZER_KEYS, Keys, without_wrappers
from automodel_ckpt.convert.formats.torch.plain_values import plain_values
from automodel_ckpt.convert.formats.torch.torch_files import faults_of
from automodel_ckpt.convert.formats.torch.training_state import (
    OptimizerState,
    ParameterGroup,
    TrainingState,
)
from automodel_ckpt.errors import CheckpointUnusable

_SCHEDULER_KEYS = ("lr_scheduler", "scheduler", "lr_schedulers", "sched", "scheduler_state_dict")
# Keys of counters, at the top level and in a mapping of the trainer's own state (torchtitan's train_state).
_COUNTER_KEYS = ("train_state", "trainer_state", "train_progress")
_STEPS = ("step", "global_step")
_EPOCHS = ("epoch", "epochs")
_SAMPLES = ("consumed_samples", "samples_seen", "num_samples")
_STATE = "state"
_GROUPS = "param_groups"
_STEP = "step"
_PARAMS = "params"
# The dtypes in which programs store numbers as tensors.
_NUMBERS = ("F64", "F32", "I64", "I32")
_MAX_COUNT = 2**53

Number = int | float | bool


@dataclass(slots=True)
class _Optimizer:
    """The names in ``.metadata`` that belong to an optimizer: {FQN: {entry: name}}, and the names of its groups.

    *grouped* maps a path below ``param_groups`` to a name: an index and an option, or (flattened) an FQN and an option,
    or nothing, where the list is one value.
    """

    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    grouped: dict[Keys, str] = field(default_factory=dict)


def read_optimizer(
    directory: Path,
    content: DcpContent,
    key: str | None,
    weights: Mapping[str, Tensor],
    *,
    rename: Callable[[str], str] = without_wrappers,
) -> OptimizerState | None:
    """Return the state of the optimizer under *key*; None if there is none.

    *weights* are the model's tensors, and *rename* converts the FQNs in the state to their names. Raises
    :class:`CheckpointUnusable` if the state does not belong to them, or if it numbers its parameters.
    """
    found = _optimizer(content, key)
    if not found.entries and not found.grouped:
        return None
    _check_named(found, directory)
    names = _model_names(found, weights, directory, rename)
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Number]] = {}
    reader = _Reader(directory, content, found)
    for fqn, entries in found.entries.items():
        name = names[fqn]
        for entry, stored in entries.items():
            described = content.tensors.get(stored)
            if described is not None and _is_moment(entry, described):
                _check_shape(name, entry, described, weights, directory)
                moment = reader.tensor(stored, f"{name}.{entry}")
                tensors.setdefault(name, {})[entry] = moment
            else:
                values.setdefault(name, {})[entry] = reader.number(stored)
    groups = _groups(found, reader, names, directory, rename)
    return OptimizerState(directory, tensors, values, groups)


def read_training_state(
    directory: Path, content: DcpContent, weights: Mapping[str, Tensor]
) -> TrainingState | None:
    """Return the training state that was saved in the same state dict as the model; None if there is no optimizer."""
    key = optimizer_key(content)
    if key is None:
        return None
    optimizer = read_optimizer(directory, content, key, weights)
    counters = read_counters(directory, content)
    omitted: list[str] = []
    used = {key, *_SCHEDULER_KEYS, *_COUNTER_KEYS, *_STEPS, *_EPOCHS, *_SAMPLES}
    for fqn in content.values:
        first = str(_path(content, fqn)[0])
        if first not in used and first not in omitted and first.isprintable():
            omitted.append(first)
    return TrainingState(
        step=counters.step,
        epoch=counters.epoch,
        consumed_samples=counters.consumed_samples,
        optimizer=optimizer,
        scheduler=read_scheduler(directory, content),
        omitted=tuple(omitted),
    )


def read_counters(directory: Path, content: DcpContent) -> Counters:
    """Return the step, epoch and samples that the program saved beside the model, such as torchtitan's train_state."""
    numbers = _counters(directory, content)
    return Counters(_count(numbers, _STEPS), _count(numbers, _EPOCHS), _count(numbers, _SAMPLES))


def optimizer_key(content: DcpContent) -> str | None:
    """Return the key of the nested state dict that has an optimizer's state; None if there is none."""
    for key in OPTIMIZER_KEYS:
        if _optimizer(content, key).entries:
            return key
    return None


def read_scheduler(directory: Path, content: DcpContent) -> dict[str, Any] | None:
    """Return the plain values of the LR scheduler's state; None if there is none."""
    for key in _SCHEDULER_KEYS:
        items: dict[str, Item] = {}
        for fqn, item in content.values.items():
            if _path(content, fqn)[0] == key:
                items[fqn] = item
        if not items:
            continue
        state: dict[Any, Any] = {}
        for fqn, value in read_values(directory, items):
            keys = _path(content, fqn)[1:]
            if not keys and isinstance(value, dict):
                state |= value
            elif keys:
                state[".".join(map(str, keys))] = value
        with faults_of(directory / layout.DCP_METADATA):
            return plain_values(state)
    return None


# ---------------------------------------------------------------- names


def _path(content: DcpContent, fqn: str) -> Keys:
    return content.paths.get(fqn, (fqn,))


def _optimizer(content: DcpContent, key: str | None) -> _Optimizer:
    """Find the names of an optimizer's state under *key*."""
    found = _Optimizer()
    for fqn in (*content.tensors, *content.values):
        rest = _below(_path(content, fqn), key)
        if not rest:
            continue
        keys = _split(rest)
        if keys[0] == _STATE and len(keys) >= 3:
            # A numbered parameter has an int here, which _check_named() finds by its text.
            entry = ".".join(map(str, keys[2:]))
            found.entries.setdefault(str(keys[1]), {})[entry] = fqn
        elif keys[0] == _GROUPS:
            found.grouped[keys[1:]] = fqn
    return found


def _below(path: Keys, key: str | None) -> Keys:
    """Return the rest of a path that begins with *key*, whether or not the keys were joined to one; else nothing."""
    if key is None:
        return path
    if path[0] == key:
        return path[1:]
    first = path[0]
    if len(path) == 1 and isinstance(first, str) and first.startswith(f"{key}."):
        return (first.removeprefix(f"{key}."),)
    return ()


def _split(rest: Keys) -> Keys:
    """Return the keys below an optimizer: a flattened key is divided into its kind, the FQN, and the entry."""
    first = rest[0]
    if len(rest) > 1 or not isinstance(first, str):
        return rest
    kind, _, others = first.partition(".")
    fqn, dot, entry = others.rpartition(".")
    if kind not in (_STATE, _GROUPS) or not dot:
        return rest
    return (kind, fqn, entry)


def _check_named(found: _Optimizer, directory: Path) -> None:
    numbered = [fqn for fqn in found.entries if fqn.isdecimal()]
    if numbered:
        raise CheckpointUnusable(
            "the optimizer's state numbers its parameters instead of naming them",
            where=str(directory / layout.DCP_METADATA),
            value=f"state.{numbered[0][:20]}",
            hint="save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns",
        )


def _model_names(
    found: _Optimizer,
    weights: Mapping[str, Tensor],
    directory: Path,
    rename: Callable[[str], str],
) -> dict[str, str]:
    """Return {FQN in the optimizer's state: name of the weight}."""
    fqns = set(found.entries)
    for keys in found.grouped:
        if len(keys) == 2 and isinstance(keys[0], str):
            fqns.add(keys[0])
    names = {fqn: rename(fqn) for fqn in fqns}
    for fqn in found.entries:
        if names[fqn] not in weights:
            raise unusable(
                "the optimizer has state of a parameter that the model does not have",
                directory / layout.DCP_METADATA,
                fqn[:200],
            )
    if len(set(names.values())) != len(names):
        what = "the optimizer has two states of one parameter"
        raise unusable(what, directory / layout.DCP_METADATA, f"{len(names)} names")
    return names


# ---------------------------------------------------------------- values


class _Reader:
    """Reads what the names of an optimizer's state stand for."""

    def __init__(self, directory: Path, content: DcpContent, found: _Optimizer) -> None:
        self._directory = directory
        names = set(found.grouped.values())
        for entries in found.entries.values():
            names.update(entries.values())
        described = {name: content.tensors[name] for name in names if name in content.tensors}
        items = {name: content.values[name] for name in names if name in content.values}
        self._tensors: dict[str, Tensor] = {}
        for tensor in read_tensors(directory, DcpContent(described, {})):
            self._tensors[tensor.fqn] = tensor
        self._values = dict(read_values(directory, items))

    def tensor(self, stored: str, name: str) -> Tensor:
        """Return the tensor of the name *stored* under another *name*."""
        return self._tensors[stored].renamed(name)

    def value(self, stored: str) -> Any:
        """Return a value: a tensor of one element as its number, any other as it is described."""
        return self.number(stored) if stored in self._tensors else self._values[stored]

    def number(self, stored: str) -> Number:
        """Return a number, which is stored as a tensor of one element, or as a value."""
        if stored in self._tensors:
            tensor = self._tensors[stored]
            if tensor.dtype not in _NUMBERS or math.prod(tensor.shape) != 1:
                value = f"{tensor.dtype} {list(tensor.shape)}"
                raise self._unusable("a number of the optimizer is stored in another form", value)
            found: Number = _scalar(self._directory, tensor)
            return found
        number = self._values[stored]
        if type(number) not in (int, float, bool):
            value = f"{stored[:200]}: {type(number).__name__}"
            raise self._unusable("a value of the optimizer's state is not a number", value)
        return number  # type: ignore[no-any-return]

    def _unusable(self, what: str, value: str) -> CheckpointUnusable:
        return unusable(what, self._directory / layout.DCP_METADATA, value)


def _is_moment(entry: str, described: Described) -> bool:
    return entry != _STEP and bool(described.shape)


def _check_shape(
    name: str, entry: str, described: Described, weights: Mapping[str, Tensor], directory: Path
) -> None:
    weight = weights[name]
    if described.shape != weight.shape:
        value = f"{name}: {entry} {list(described.shape)}, weight {list(weight.shape)}"
        what = "the optimizer's state and the weight have different shapes"
        raise unusable(what, directory / layout.DCP_METADATA, value)


# ---------------------------------------------------------------- groups


def _groups(
    found: _Optimizer,
    reader: _Reader,
    names: Mapping[str, str],
    directory: Path,
    rename: Callable[[str], str],
) -> tuple[ParameterGroup, ...]:
    where = directory / layout.DCP_METADATA
    with faults_of(where):
        if _is_by_parameter(found, names):
            return tuple(_groups_by_parameter(found, reader, names))
        return tuple(_listed_groups(_group_list(found, reader), where, rename))


def _is_by_parameter(found: _Optimizer, names: Mapping[str, str]) -> bool:
    """Whether each option is stored for each parameter, as the flattened form does."""
    return any(len(keys) == 2 and keys[0] in names for keys in found.grouped)


def _groups_by_parameter(
    found: _Optimizer, reader: _Reader, names: Mapping[str, str]
) -> Iterator[ParameterGroup]:
    """Yield the groups: parameters with the same options are in one, in the order in which they are stored."""
    options: dict[str, dict[str, Any]] = {}
    for keys, stored in found.grouped.items():
        if len(keys) == 2 and keys[0] in names:
            options.setdefault(str(keys[0]), {})[str(keys[1])] = reader.value(stored)
    members: dict[str, list[str]] = {}
    common: dict[str, dict[str, Any]] = {}
    for fqn, given in options.items():
        plain = _options(given)
        # Plain values have the same text if and only if they are equal, also lists.
        text = repr(sorted(plain.items()))
        members.setdefault(text, []).append(names[fqn])
        common[text] = plain
    for text, parameters in members.items():
        yield ParameterGroup(tuple(parameters), common[text])


def _group_list(found: _Optimizer, reader: _Reader) -> list[dict[Any, Any]]:
    """Return ``param_groups``: stored as one value, or (with tensors in it) each option as one."""
    if () in found.grouped:
        value = reader.value(found.grouped[()])
        groups = value if isinstance(value, list) else []
        return [group for group in groups if isinstance(group, dict)]
    by_index: dict[int, dict[Any, Any]] = {}
    for keys, stored in found.grouped.items():
        index = keys[0]
        if len(keys) == 2 and isinstance(index, int):
            by_index.setdefault(index, {})[keys[1]] = reader.value(stored)
        elif len(keys) == 1 and isinstance(index, int):
            value = reader.value(stored)
            by_index[index] = value if isinstance(value, dict) else {}
    return [by_index[index] for index in sorted(by_index)]


def _listed_groups(
    groups: list[dict[Any, Any]], where: Path, rename: Callable[[str], str]
) -> Iterator[ParameterGroup]:
    for group in groups:
        members = group.get(_PARAMS)
        if not isinstance(members, list) or not all(type(fqn) is str for fqn in members):
            what = "a group of the optimizer does not list the names of its parameters"
            raise unusable(what, where, repr(members)[:200])
        yield ParameterGroup(tuple(map(rename, members)), _options(group))


def _options(group: Mapping[Any, Any]) -> dict[str, Any]:
    plain = plain_values(group)
    return {key: value for key, value in plain.items() if key not in (_PARAMS, "param_names")}


# ---------------------------------------------------------------- counters


def _counters(directory: Path, content: DcpContent) -> dict[str, Number]:
    """Return the numbers at the top level, or in a mapping of the trainer's own state."""
    items: dict[str, Item] = {}
    described: dict[str, Described] = {}
    keys_of: dict[str, str] = {}
    wanted = {*_STEPS, *_EPOCHS, *_SAMPLES}
    for fqn in (*content.tensors, *content.values):
        path = _path(content, fqn)
        if path[0] in _COUNTER_KEYS:
            path = path[1:]
        if len(path) != 1 or path[0] not in wanted:
            continue
        keys_of[fqn] = str(path[0])
        if fqn in content.values:
            items[fqn] = content.values[fqn]
        elif math.prod(content.tensors[fqn].shape) == 1:
            described[fqn] = content.tensors[fqn]
    found: dict[str, Number] = {}
    for tensor in read_tensors(directory, DcpContent(described, {})):
        if tensor.dtype in _NUMBERS:
            found[keys_of[tensor.fqn]] = _scalar(directory, tensor)
    for fqn, value in read_values(directory, items):
        if type(value) is int:
            found[keys_of[fqn]] = value
    return found


def _count(counters: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = counters.get(key)
        # Not isinstance: True is an int, too.
        if type(value) is int and 0 <= value < _MAX_COUNT:
            return value
    return None


def _scalar(directory: Path, tensor: Tensor) -> Any:
    """Return the value of a tensor with one element, as a number."""
    # Imported here: opening a model must not import numpy.
    from automodel_ckpt.checkpoint.tensors.stored import whole

    return whole(directory, tensor).item()
