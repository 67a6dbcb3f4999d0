"""The names of the parameters that an optimizer numbers, by their shapes. Imports no torch.

A torch optimizer numbers its parameters in the order in which it got them, group after group. Programs fill each group
in the order of ``named_parameters()``: this is the order of ``AdamW(model.parameters())``, and of each loop over names
that puts the parameters into groups (weight decay, learning rates by layer or by part of the model, LoRA+).
:func:`fitting_names` returns names only if a single division of the model's parameters into groups fits all shapes
(``group_division.py``). Otherwise it rejects the state, because moments of other parameters would damage the training
without an error.

The Trainer of transformers has a rule of two groups: first the parameters with weight decay, then those without (5.23,
``Trainer.create_optimizer``). In its checkpoints, this division is used if several fit, and if the groups differ in
nothing but weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.convert.sources.group_division import (
    Division,
    Shape,
    divide,
    first_positions,
    last_positions,
)
from automodel_ckpt.convert.training_state import ModelParameter
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.units import counted

Key = int | str
"""The number or the name under which an optimizer stores the state of a parameter."""

IN_ORDER = "by shape, in the order of named_parameters()"
IN_GROUPS = "by shape, each group in the order of named_parameters()"
BY_TRAINER = "by the Trainer's groups: first the parameters with weight decay"
_DECAY = "weight_decay"
_MAX_NAMED = 8
_WITH_PARAMETERS = ("params", "param_names")
_HINT = (
    "give each of its param_groups the names of its parameters as a list 'param_names', which torch saves if the "
    "optimizer gets named_parameters(), or import the weights without --training-state"
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
    numbered: NumberedGroups, model: Sequence[ModelParameter], *, by_trainer: bool = False
) -> tuple[dict[Key, str], str]:
    """Return the names of the parameters by their numbers, and how they were found, in words.

    *model* are the parameters of the model in its order. *by_trainer*: the file is one of transformers' Trainer. Raises
    :class:`CheckpointUnusable` if the names do not follow from the shapes.
    """
    groups = numbered.filled
    has_moments = any(shape is not None for shape in numbered.shapes.values())
    if not has_moments and numbered.have_equal_options:
        # SGD without momentum: nothing can be assigned wrongly.
        groups = [[key for group in groups for key in group]]
    shapes = [[numbered.shapes[key] for key in group] for group in groups]
    division = divide(shapes, [parameter.shape for parameter in model])
    if division.positions is not None:
        names: dict[Key, str] = {}
        for group, positions in zip(groups, division.positions, strict=True):
            for key, position in zip(group, positions, strict=True):
                names[key] = model[position].name
        return names, IN_ORDER if len(groups) == 1 else IN_GROUPS
    if division.is_ambiguous and by_trainer and numbered.differ_in_decay:
        found = _names_by_rule(numbered, _by_decay(model))
        if found is not None:
            return found, BY_TRAINER
    raise _failure(numbered, groups, division, model)


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
        value="; ".join(reasons),
        hint=_HINT,
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
    return CheckpointUnusable(
        "the numbers in the optimizer's state cannot be assigned to the model's parameters",
        where=str(numbered.path),
        value=f"{_sizes(numbered)}, {counted(len(model), 'parameter')}; no groups fit; compared with usual ones:"
        + "".join(f"\n    {reason}" for reason in reasons),
        hint="use the config.json of the model that was trained, or import the weights without --training-state",
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
