"""The order in which an optimizer numbers the parameters of a model, by their shapes. Imports no torch.

A torch optimizer numbers its parameters in the order in which it got them, over all groups. :func:`fitting_names` tries
the orders that programs use:

* ``named_parameters()``: what ``AdamW(model.parameters())`` gets;
* first the parameters with weight decay, then those without (norms and biases), each in the order of
  ``named_parameters()``: the two groups of transformers' Trainer (5.23, ``Trainer.create_optimizer``);
* first the parameters of two or more dimensions, then the others: two groups that many training scripts use.

An order is accepted if every moment has the shape of its parameter. Parameters that were frozen are absent: the order
is then accepted if the numbered shapes fit into it in exactly one way. If no order fits, or several give different
names, the state is rejected, because moments of other parameters would damage the training without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.convert.training_state import ModelParameter
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.units import counted

Shape = tuple[int, ...]
Key = int | str
"""The number or the name under which an optimizer stores the state of a parameter."""


@dataclass(frozen=True, slots=True)
class _Order:
    """An order in which a program may have numbered parameters: its name, and the parameters of each group.

    With one group, the numbers of all of the optimizer's groups count through it.
    """

    name: str
    groups: tuple[tuple[ModelParameter, ...], ...]


@dataclass(frozen=True, slots=True)
class _Fit:
    """The result of comparing an order with the numbered shapes: the names by number, or the *reason* why not.

    With *is_ambiguous*, the order fits in several ways.
    """

    order: str
    names: Mapping[Key, str] | None
    reason: str = ""
    is_ambiguous: bool = False


def fitting_names(
    keys: Sequence[Sequence[Key]],
    shapes: Mapping[Key, Shape | None],
    model: Sequence[ModelParameter],
    path: Path,
) -> dict[Key, str]:
    """Return the names of the parameters by their numbers, if they follow from the shapes.

    *keys* are the numbers in each group of the optimizer, *shapes* those of the moments (None without moments), and
    *model* the parameters of the model in its order. *path* is the file, for errors. Raises
    :class:`CheckpointUnusable` if no order fits, or if several names are possible.
    """
    orders = _orders(model)
    if all(shape is None for shape in shapes.values()):
        # There are no moments (SGD without momentum): the groups decide, and nothing can be assigned wrongly.
        orders = [order for order in orders if len(order.groups) == len(keys)][:1] or orders[:1]
    fits = [_fit(order, keys, shapes) for order in orders]
    found = [fit for fit in fits if fit.names is not None]
    # An order that fits in several ways may be the right one, even if another order fits in one way.
    ambiguous = [fit for fit in fits if fit.is_ambiguous]
    if not found or ambiguous:
        what = "the numbers in the optimizer's state cannot be assigned to the model's parameters"
        reasons = [f"{fit.order}: {fit.reason or 'fits'}" for fit in fits]
        raise CheckpointUnusable(
            what,
            where=str(path),
            value=f"{len(shapes)} numbers, {len(model)} parameters; the orders that were tried:"
            + "".join(f"\n    {reason}" for reason in reasons),
            hint="use the config.json of the model that was trained, or import the weights without --training-state",
        )
    names = dict(found[0].names or {})
    for fit in found[1:]:
        if fit.names != names:
            raise CheckpointUnusable(
                "the numbers in the optimizer's state fit the model's parameters in two orders",
                where=str(path),
                value=f"{found[0].order}; {fit.order}",
                hint="import the weights without --training-state",
            )
    return names


def _orders(model: Sequence[ModelParameter]) -> list[_Order]:
    decayed = tuple(parameter for parameter in model if parameter.decays)
    others = tuple(parameter for parameter in model if not parameter.decays)
    matrices = tuple(parameter for parameter in model if len(parameter.shape) >= 2)
    vectors = tuple(parameter for parameter in model if len(parameter.shape) < 2)
    return [
        _Order("named_parameters()", (tuple(model),)),
        _Order("with decay first, then without", (decayed, others)),
        _Order("matrices first, then vectors", (matrices, vectors)),
    ]


def _fit(order: _Order, keys: Sequence[Sequence[Key]], shapes: Mapping[Key, Shape | None]) -> _Fit:
    """Compare an order with the numbered shapes."""
    numbered = list(keys)
    if len(order.groups) == 1:
        numbered = [[key for group in keys for key in group]]
    if len(numbered) != len(order.groups):
        reason = f"the optimizer has {len(numbered)} group(s), not {len(order.groups)}"
        return _Fit(order.name, None, reason)
    names: dict[Key, str] = {}
    ambiguity = ""
    for group_keys, members in zip(numbered, order.groups, strict=True):
        first = _positions([shapes[key] for key in group_keys], members)
        if first is None:
            return _Fit(order.name, None, _mismatch(group_keys, members, shapes))
        last = _last_positions([shapes[key] for key in group_keys], members)
        for key, at_first, at_last in zip(group_keys, first, last, strict=True):
            names[key] = members[at_first].name
            if at_first != at_last and not ambiguity:
                num_frozen = len(members) - len(group_keys)
                choice = f"{names[key]} or {members[at_last].name}"
                ambiguity = f"frozen: {counted(num_frozen, 'parameter')}, unknown which: {key} may be {choice}"
    if ambiguity:
        return _Fit(order.name, None, ambiguity, is_ambiguous=True)
    return _Fit(order.name, names)


def _positions(
    wanted: Sequence[Shape | None], available: Sequence[ModelParameter]
) -> list[int] | None:
    """Return the first possible position of each of the *wanted* shapes, in order; None if they do not fit.

    They are a subsequence of those that are *available*, because frozen parameters have no number. A shape of None
    fits any.
    """
    positions: list[int] = []
    position = 0
    for shape in wanted:
        if shape is not None:
            while position < len(available) and available[position].shape != shape:
                position += 1
        if position == len(available):
            return None
        positions.append(position)
        position += 1
    return positions


def _last_positions(
    wanted: Sequence[Shape | None], available: Sequence[ModelParameter]
) -> list[int]:
    """Return the last possible position of each of the *wanted* shapes, which fit.

    Where it equals the first possible position of all of them, there is only one way to assign them.
    """
    backward = _positions(wanted[::-1], available[::-1])
    assert backward is not None, "shapes that fit in one direction fit in the other one"
    return [len(available) - 1 - position for position in reversed(backward)]


def _mismatch(
    keys: Sequence[Key], members: Sequence[ModelParameter], shapes: Mapping[Key, Shape | None]
) -> str:
    """Describe the first difference, in words."""
    if len(keys) > len(members):
        return f"a group has {len(keys)} parameters, the model only {len(members)} of its kind"
    for key, member in zip(keys, members, strict=False):
        shape = shapes[key]
        if shape is not None and shape != member.shape:
            return f"{key} has the shape {list(shape)}, {member.name} {list(member.shape)}"
    return "the shapes occur in another order"
