"""State dicts of optimizers, and of their LR schedulers, under names that every strategy and world size shares."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.module_tensors import without_memory
from automodel_ckpt.checkpoint.state.optimizer_state import FORMS, forms_of
from automodel_ckpt.errors import RecipeError

Groups = list[dict[str, torch.Tensor]]
"""For each of an optimizer's parameter groups, {FQN: a tensor without memory} of what it trains."""


def trained_by_all(optimizer: Optimizer) -> Groups | None:
    """What all ranks train together, by the names of :class:`Owners`, where their optimizers train different
    parameters.

    None where they train the same. Such an optimizer has it in its attribute ``whole``.
    """
    groups: Groups | None = getattr(optimizer, "whole", None)
    return groups


class Owners:
    """The recipe's modules as children of one module, so that FQNs of an optimizer over several are unambiguous.

    ``model.layers.0.weight`` of the attribute ``model`` is ``model.model.layers.0.weight`` here.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.roof = nn.Module()
        for item in items:
            if item.kind == "module":
                # Module names may not hold dots.
                self.roof.add_module(item.name.replace(".", "%"), item.value)

    def optimizer_state(self, item: Item) -> dict[str, Any]:
        """``{"state": {fqn: {...}}, "param_groups": [...]}``; where there is no state at all, it is created first.

        The groups name what all ranks train, the state is this rank's.
        """
        self.check_parameters(item)
        state: dict[str, Any] = dict(get_optimizer_state_dict(self.roof, item.value))
        for group, names in zip(
            state["param_groups"], trained_by_all(item.value) or (), strict=False
        ):
            group["params"] = list(names)
        return state

    def groups(self, item: Item) -> Groups:
        """What each parameter group of this rank's optimizer trains."""
        fqns = {id(parameter): fqn for fqn, parameter in self.roof.named_parameters()}
        return [
            {fqns[id(p)]: without_memory(p) for p in group["params"]}
            for group in item.value.param_groups
        ]

    def parameters(self, item: Item, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The parameters of this rank's optimizer by FQN; *state* is the result of :meth:`optimizer_state`."""
        named = self._names_here(item, state)
        trained = [group["params"] for group in item.value.param_groups]
        return {
            fqn: p
            for names, ps in zip(named, trained, strict=True)
            for fqn, p in zip(names, ps, strict=True)
        }

    def set_optimizer_state(self, item: Item, state: Mapping[str, Any]) -> None:
        """Give the optimizer a *state* of the form that :meth:`optimizer_state` returns. A parameter without an entry
        has no state afterwards.

        PyTorch's ``set_optimizer_state_dict`` is not used: it allows at most one group without parameters, and a
        pipeline stage may have several.
        """
        groups = [
            {**options, "params": list(names)}
            for options, names in zip(
                state["param_groups"], self._names_here(item, state), strict=True
            )
        ]
        mine = {fqn for group in groups for fqn in group["params"]}
        entries = {fqn: entry for fqn, entry in state["state"].items() if fqn in mine}
        item.value.load_state_dict({"state": entries, "param_groups": groups})

    def _names_here(self, item: Item, state: Mapping[str, Any]) -> list[list[str]]:
        """FQNs of what each group of this rank's optimizer trains; *state* is what :meth:`optimizer_state` gave."""
        if trained_by_all(item.value) is not None:
            return [list(names) for names in self.groups(item)]
        return [group["params"] for group in state["param_groups"]]

    def check_parameters(self, item: Item) -> None:
        """Raise :class:`RecipeError` where an optimizer trains a parameter that belongs to no module of the recipe."""
        known = {id(parameter) for parameter in self.roof.parameters()}
        mine = [parameter for group in item.value.param_groups for parameter in group["params"]]
        strangers = [tuple(parameter.shape) for parameter in mine if id(parameter) not in known]
        if strangers:
            raise RecipeError(
                "an optimizer trains parameters of a module that is not an attribute of the recipe",
                where=f"recipe attribute {item.name!r}",
                value=f"{len(strangers)} parameter(s), the first of shape {list(strangers[0])}",
                hint="assign their module to an attribute of the recipe, so that it is saved too",
            )


def optimizer_tree(
    item: Item, items: Iterable[Item], owners: Owners, *, create: bool = False
) -> dict[str, Any]:
    """The state of an optimizer and of its LR schedulers, by attribute name.

    That of a scheduler is in a tuple, which DCP stores whole (it would turn the integer keys of a MultiStepLR into
    text). A parameter that was never updated has no state, unless *create* is true.
    """
    schedulers = {i.name: (i.value.state_dict(),) for i in items if i.owner == item.name}
    with _made(item) if create else _as_it_is(item.value):
        state = owners.optimizer_state(item)
    if not create and (forms := forms_of(state)):
        state[FORMS] = (forms,)
    return {item.name: state, **schedulers}


@contextmanager
def _as_it_is(optimizer: Optimizer) -> Iterator[None]:
    """Prevent PyTorch from creating missing optimizer state: it would do so by a step, which counts."""
    first = next(
        (parameter for group in optimizer.param_groups for parameter in group["params"]), None
    )
    if optimizer.state or first is None:
        yield
        return
    optimizer.state[first] = {}
    try:
        yield
    finally:
        del optimizer.state[first]


@contextmanager
def _made(item: Item) -> Iterator[None]:
    """PyTorch makes state for all parameters or for none, and for none where one has a gradient, which would be that of
    other weights than those to be read. It does so by a step with a closure, which not every optimizer takes."""
    optimizer = item.value
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if len(optimizer.state) < len(trained):
        optimizer.state.clear()
        for parameter in trained:
            parameter.grad = None
    own, step = vars(optimizer).get("step"), optimizer.step
    parameters = inspect.signature(step).parameters.values()
    if not any(p.name == "closure" or p.kind is p.VAR_KEYWORD for p in parameters):
        optimizer.step = lambda closure: step()
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(
            "the optimizer cannot create its state: its step() failed with zero gradients",
            where=f"recipe attribute {item.name!r}",
            value=repr(error),
            hint="change step() so that it works with zero gradients: "
            "a resume reads the saved state into what it creates",
        ) from error
    finally:
        vars(optimizer).pop("step", None)
        if own is not None:
            optimizer.step = own
