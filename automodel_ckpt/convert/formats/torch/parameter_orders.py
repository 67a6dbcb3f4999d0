"""The names of the parameters that an optimizer numbers, by their shapes. Imports no torch.

A torch optimizer numbers its parameters in the order in which it got them, group after group. Programs fill each group
in the order of ``named_parameters()``: this is the order of ``AdamW(model.parameters())``, and of each loop over names
that puts the parameters into groups (weight decay, learning rates by layer or by part of the model, LoRA+).
:func:`fitting_names` returns names only if a single division of the model's parameters into groups fits all shapes
(``group_division.py``). Otherwise it rejects the state, because moments of other parameters would damage the training
without an error. The user can state which parameters each group may have (``convert/formats/torch/stated_groups.py``).

The Trainer of transformers has a rule of two groups: first the parameters with weight decay, then those without (5.23,
``Trainer.create_optimizer``). In its checkpoints, this division is used if several fit, and if the groups differ in
nothing but weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.convert.formats.torch.group_division import (
    Division,
    Shape,
    divide,
    first_positions,
    fits,
    last_positions,
    only_allowed,
)
from automodel_ckpt.convert.formats.torch.stated_groups import OPTION, StatedGroup
from automodel_ckpt.convert.formats.torch.training_state import ModelParameter
from automodel_ckpt.errors import CheckpointUnusable

Key = int | str
"""The number or the name under which an optimizer stores the state of a parameter."""

IN_ORDER = "by shape, in the order of named_parameters()"
IN_GROUPS = "by shape, each group in the order of named_parameters()"
BY_TRAINER = "by the Trainer's groups: first the parameters with weight decay"
AS_STATED = f"as {OPTION} states, each group in the order of named_parameters()"
_DECAY = "weight_decay"
_MAX_NAMED = 8
_MAX_GROUPS = 40
_WITH_PARAMETERS = ("params", "param_names")
_SHOWN_OPTIONS = ("lr", "initial_lr", _DECAY)
_HINT = (
    f"state the parameters of each group with {OPTION} (docs/guides/migrate.md, Numbered parameters); or give each of "
    "the file's param_groups the names of its parameters as a list 'param_names', which torch saves if the optimizer "
    "gets named_parameters(); or import the weights without --training-state"
)
_NARROWER_HINT = (
    f"state the groups with globs that match fewer parameters: leave out frozen ones, and in each {OPTION} those of "
    "other groups"
)
_OTHER_MODEL = "use the config.json of the model that was trained, or import the weights without --training-state"
_SINGLE_EXPERTS = (
    "an optimizer with a parameter for each expert, as of transformers 4, cannot be continued: transformers 5 has one "
    "for all experts of a layer; import the weights without --training-state"
)
_FUSED = 3
"""Dimensions of the weights of all experts of a layer."""
_STATED_HINT = (
    f"give one {OPTION} for each group, in the order of the optimizer's param_groups, with globs that match its "
    "parameters"
)


@dataclass(frozen=True, slots=True)
class NumberedGroups:
    """The groups of an optimizer that numbers its parameters.

    *keys* are the numbers in each group, *shapes* those of the moments (None without moments), and *options* what the
    file has of each group. *path* is the file, for errors.
    """

    keys: Sequence[Sequence[Key]]
    shapes: Mapping[Key, Shape | None]
    options: Sequence[Mapping[str, Any]]
    path: Path

    @property
    def filled(self) -> list[Sequence[Key]]:
        """The numbers in the groups that are not empty."""
        return [group for group in self.keys if group]

    @property
    def have_equal_options(self) -> bool:
        """Whether all groups have the same options, so that it does not matter which group a parameter is in."""
        plain = [_without(options, _WITH_PARAMETERS) for options in self.options]
        return all(options == plain[0] for options in plain)

    @property
    def differ_in_decay(self) -> bool:
        """Whether these are two groups that differ at most in their weight decay, which is 0 in the second one."""
        if len(self.options) != 2 or self.options[1].get(_DECAY) not in (0, 0.0):
            return False
        first, second = [_without(options, (*_WITH_PARAMETERS, _DECAY)) for options in self.options]
        return first == second


def fitting_names(
    numbered: NumberedGroups,
    model: Sequence[ModelParameter],
    stated: Sequence[StatedGroup] = (),
    *,
    by_trainer: bool = False,
) -> tuple[dict[Key, str], str]:
    """Return the names of the parameters by their numbers, and how they were found, in words.

    *model* are the parameters of the model in its order, and *stated* the groups that the user states. *by_trainer*:
    the file is one of transformers' Trainer. Raises :class:`CheckpointUnusable` if the names do not follow from the
    shapes and from what is stated.
    """
    if stated:
        return _stated_names(numbered, model, stated), AS_STATED
    groups = numbered.filled
    has_moments = any(shape is not None for shape in numbered.shapes.values())
    if not has_moments and numbered.have_equal_options:
        # SGD without momentum: nothing can be assigned wrongly.
        groups = [[key for group in groups for key in group]]
    shapes = [[numbered.shapes[key] for key in group] for group in groups]
    division = divide(shapes, [parameter.shape for parameter in model])
    if division.positions is not None:
        names = _names_at(groups, division.positions, model)
        return names, IN_ORDER if len(groups) == 1 else IN_GROUPS
    if division.is_ambiguous and by_trainer and numbered.differ_in_decay:
        found = _names_by_rule(numbered, _by_decay(model))
        if found is not None:
            return found, BY_TRAINER
    raise _failure(numbered, groups, division, model)


def _stated_names(
    numbered: NumberedGroups, model: Sequence[ModelParameter], stated: Sequence[StatedGroup]
) -> dict[Key, str]:
    """Return the names in the groups that the user states. Raises :class:`CheckpointUnusable` if they do not fit."""
    if len(stated) == len(numbered.keys):
        # Also for groups that are empty in the file, as those of the decay of a part that has only matrices.
        stated = [group for group, keys in zip(stated, numbered.keys, strict=True) if keys]
    groups = numbered.filled
    if len(stated) != len(groups):
        raise _wrong_statement(numbered, f"{counted(len(stated), 'group')} stated")
    shapes = [[numbered.shapes[key] for key in group] for group in groups]
    available = [parameter.shape for parameter in model]
    division = divide(shapes, available, [group.positions for group in stated])
    if division.positions is not None:
        return _names_at(groups, division.positions, model)
    if division.is_ambiguous:
        raise _failure(numbered, groups, division, model, hint=_NARROWER_HINT)
    for keys, wanted, group in zip(groups, shapes, stated, strict=True):
        found = _first_fault(keys, wanted, only_allowed(available, group.positions), model)
        if found:
            raise _wrong_statement(numbered, f"{OPTION} {group.text!r:.200}: {found}")
    raise _wrong_statement(numbered, "each group fits alone, but two of them need a parameter")


def _first_fault(
    keys: Sequence[Key],
    wanted: Sequence[Shape | None],
    available: Sequence[Shape | None],
    model: Sequence[ModelParameter],
) -> str:
    """Describe why a group does not fit the parameters that are *available*; empty if it fits."""
    matched = [model[at].name for at, shape in enumerate(available) if shape is not None]
    sizes = f"it matches {counted(len(matched), 'parameter')}, {matched[0]} to {matched[-1]}"
    if len(keys) > len(matched):
        return f"{sizes}; the group has {len(keys)}"
    position = 0
    for key, shape in zip(keys, wanted, strict=True):
        start = position
        while position < len(available) and not fits(shape, available[position]):
            position += 1
        if position == len(available):
            following = [at for at in range(start, len(available)) if available[at] is not None]
            found = "none is left"
            if following:
                found = f"the next is {model[following[0]].name} {list(model[following[0]].shape)}"
            needed = "any shape" if shape is None else f"the shape {list(shape)}"
            return f"{sizes}; {key} needs one with {needed}, and {found}"
        position += 1
    return ""


def _wrong_statement(numbered: NumberedGroups, value: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        f"the groups that {OPTION} states do not fit the optimizer's state",
        where=str(numbered.path),
        value=f"{value}{_listed(numbered)}",
        hint=_STATED_HINT,
    )


def _listed(numbered: NumberedGroups) -> str:
    """Describe each group in a line."""
    lines = ["; the groups of the optimizer:"]
    for number, (keys, options) in enumerate(zip(numbered.keys, numbered.options, strict=True)):
        if number == _MAX_GROUPS:
            lines.append(f"{len(numbered.keys) - number} more")
            break
        described = [counted(len(keys), "parameter")]
        described += [f"{name} {options[name]!r:.40}" for name in _SHOWN_OPTIONS if name in options]
        lines.append(f"{number}: {', '.join(described)}")
    return "\n    ".join(lines)


def _names_at(
    groups: Sequence[Sequence[Key]],
    positions: Sequence[Sequence[int]],
    model: Sequence[ModelParameter],
) -> dict[Key, str]:
    names: dict[Key, str] = {}
    for group, places in zip(groups, positions, strict=True):
        for key, position in zip(group, places, strict=True):
            names[key] = model[position].name
    return names


def _without(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _by_decay(model: Sequence[ModelParameter]) -> list[list[ModelParameter]]:
    return [
        [parameter for parameter in model if parameter.decays],
        [parameter for parameter in model if not parameter.decays],
    ]


def _names_by_rule(
    numbered: NumberedGroups, members: Sequence[Sequence[ModelParameter]]
) -> dict[Key, str] | None:
    """Return the names if the groups consist of these *members*, some of which may be frozen; None if unclear."""
    names: dict[Key, str] = {}
    for keys, parameters in zip(numbered.keys, members, strict=True):
        shapes = [numbered.shapes[key] for key in keys]
        available = [parameter.shape for parameter in parameters]
        first = first_positions(shapes, available)
        if first is None or first != last_positions(shapes, available):
            return None
        names.update((key, parameters[at].name) for key, at in zip(keys, first, strict=True))
    return names


# ---------------------------------------------------------------- errors


def _failure(
    numbered: NumberedGroups,
    groups: Sequence[Sequence[Key]],
    division: Division,
    model: Sequence[ModelParameter],
    *,
    hint: str = _HINT,
) -> CheckpointUnusable:
    if not division.is_ambiguous:
        return _not_fitting(numbered, model)
    reasons = [f"{_sizes(numbered)}, {counted(len(model), 'parameter')}"]
    if (num_frozen := len(model) - len(numbered.shapes)) > 0:
        reasons.append(f"frozen: {counted(num_frozen, 'parameter')}, unknown which")
    if division.choice is not None:
        (group, number), one, other = division.choice
        key = groups[group][number]
        shape = numbered.shapes[key]
        described = f"{key}" if shape is None else f"{key} with the shape {list(shape)}"
        reasons.append(f"{described} may be {model[one].name} or {model[other].name}")
    elif division.equal_groups is not None:
        first, second = (groups[group][0] for group in division.equal_groups)
        reasons.append(
            f"the groups that begin with {first} and {second} have the same shapes, so each may be the other one"
        )
    else:
        reasons.append("the groups have too many shapes in common")
    return CheckpointUnusable(
        "the numbers in the optimizer's state fit the model's parameters in several ways",
        where=str(numbered.path),
        value="; ".join(reasons) + (_listed(numbered) if len(groups) > 1 else ""),
        hint=hint,
    )


def _not_fitting(numbered: NumberedGroups, model: Sequence[ModelParameter]) -> CheckpointUnusable:
    matrices = [parameter for parameter in model if len(parameter.shape) >= 2]
    vectors = [parameter for parameter in model if len(parameter.shape) < 2]
    usual = {
        "named_parameters()": [list(model)],
        "with decay first, then without": _by_decay(model),
        "matrices first, then vectors": [matrices, vectors],
    }
    reasons = [f"{order}: {_mismatch(numbered, groups)}" for order, groups in usual.items()]
    is_fused = any(len(parameter.shape) == _FUSED for parameter in model)
    has_experts = is_fused and len(numbered.shapes) > len(model)
    return CheckpointUnusable(
        "the numbers in the optimizer's state cannot be assigned to the model's parameters",
        where=str(numbered.path),
        value=f"{_sizes(numbered)}, {counted(len(model), 'parameter')}; no groups fit; compared with usual ones:"
        + "".join(f"\n    {reason}" for reason in reasons),
        hint=_SINGLE_EXPERTS if has_experts else _OTHER_MODEL,
    )


def _sizes(numbered: NumberedGroups) -> str:
    """Describe the sizes of the groups."""
    sizes = ", ".join(str(len(group)) for group in numbered.keys[:_MAX_NAMED])
    if len(numbered.keys) > _MAX_NAMED:
        sizes += ", ..."
    numbers = counted(len(numbered.shapes), "number")
    return f"{numbers} in {counted(len(numbered.keys), 'group')} ({sizes})"


def _mismatch(numbered: NumberedGroups, members: Sequence[Sequence[ModelParameter]]) -> str:
    """Describe the first difference of the groups from those with *members*, in words.

    If all members are in one group, the numbers of all of the optimizer's groups count through it.
    """
    groups = list(numbered.keys)
    if len(members) == 1:
        groups = [[key for group in groups for key in group]]
    if len(groups) != len(members):
        return f"the optimizer has {counted(len(groups), 'group')}, not {len(members)}"
    for keys, parameters in zip(groups, members, strict=True):
        if len(keys) > len(parameters):
            return (
                f"a group has {len(keys)} parameters, the model only {len(parameters)} of its kind"
            )
        for key, parameter in zip(keys, parameters, strict=False):
            shape = numbered.shapes[key]
            if shape is not None and shape != parameter.shape:
                return (
                    f"{key} has the shape {list(shape)}, {parameter.name} {list(parameter.shape)}"
                )
    return "the shapes occur in another order"
