"""State dicts of optimizers, and of their LR schedulers, under names that every strategy and world size shares."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.state.module_tensors import has_plain_names, unwrap, without_memory
from automodel_ckpt.checkpoint.state.optimizer_state import check_flat
from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

Groups = list[dict[str, Tensor]]
"""For each of an optimizer's parameter groups, {FQN: a tensor without memory} of what it trains."""


def trained_by_all(optimizer: Optimizer) -> Groups | None:
    """Return the parameters that all ranks train together, if their optimizers train different ones; else None.

    The names are as in :class:`Owners`. The recipe stores them in the optimizer's attribute ``whole``.
    """
    return getattr(optimizer, "whole", None)


class Owners:
    """The recipe's modules as children of one module, so that FQNs of an optimizer over several are unambiguous.

    ``model.layers.0.weight`` of the attribute ``model`` is ``model.model.layers.0.weight`` here.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.root = nn.Module()
        for item in items:
            if item.kind == "module":
                # Names of submodules cannot contain dots.
                self.root.add_module(item.name.replace(".", "%"), item.value)

    def optimizer_state(self, item: Item) -> ValueDict:
        """``{"state": {fqn: {...}}, "param_groups": [...]}``; where there is no state at all, it is created first.

        The groups name what all ranks train, the state is this rank's.
        """
        self.check_parameters(item)
        state = self._state_dict(item.value)
        trained = trained_by_all(item.value)
        if trained is not None:
            for group, names in zip(state["param_groups"], trained, strict=False):
                group["params"] = list(names)
        return state

    def _state_dict(self, optimizer: Optimizer) -> ValueDict:
        """The result of PyTorch's ``get_optimizer_state_dict``, which is slow with thousands of parameters (see
        :func:`has_plain_names`)."""
        modules = {name: unwrap(module) for name, module in self.root.named_children()}
        if not optimizer.state or not all(map(has_plain_names, modules.values())):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            return dict(get_optimizer_state_dict(self.root, optimizer))
        fqns: dict[int, str] = {}
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters():
                # PyTorch also uses the first name of a tied parameter.
                fqns.setdefault(id(parameter), f"{prefix}.{name}")
        names = []
        for group in optimizer.param_groups:
            names += [fqns[id(parameter)] for parameter in group["params"]]
        with torch.no_grad():
            numbered = optimizer.state_dict()
        state = {names[number]: entry for number, entry in numbered["state"].items()}
        groups = []
        for group in numbered["param_groups"]:
            groups.append({**group, "params": [names[number] for number in group["params"]]})
        return {"state": state, "param_groups": groups}

    def groups(self, item: Item) -> Groups:
        """What each parameter group of this rank's optimizer trains."""
        fqns = {id(parameter): fqn for fqn, parameter in self.root.named_parameters()}
        return [
            {fqns[id(p)]: without_memory(p) for p in group["params"]}
            for group in item.value.param_groups
        ]

    def parameters(self, item: Item, state: Values) -> dict[str, Tensor]:
        """The parameters of this rank's optimizer by FQN; *state* is the result of :meth:`optimizer_state`."""
        found: dict[str, Tensor] = {}
        groups = item.value.param_groups
        for fqns, group in zip(self._names_here(item, state), groups, strict=True):
            found.update(zip(fqns, group["params"], strict=True))
        return found

    def set_optimizer_state(self, item: Item, state: Values) -> None:
        """Give the optimizer a *state* of the form that :meth:`optimizer_state` returns. A parameter without an entry
        has no state afterwards.

        PyTorch's ``set_optimizer_state_dict`` is not used: it allows at most one group without parameters, and a
        pipeline stage may have several.
        """
        groups = []
        trained_here = set()
        names_here = self._names_here(item, state)
        for options, names in zip(state["param_groups"], names_here, strict=True):
            groups.append({**options, "params": list(names)})
            trained_here.update(names)
        entries = {fqn: entry for fqn, entry in state["state"].items() if fqn in trained_here}
        item.value.load_state_dict({"state": entries, "param_groups": groups})

    def _names_here(self, item: Item, state: Values) -> list[list[str]]:
        """FQNs of what each group of this rank's optimizer trains; *state* is what :meth:`optimizer_state` gave."""
        if trained_by_all(item.value) is not None:
            return [list(names) for names in self.groups(item)]
        return [group["params"] for group in state["param_groups"]]

    def check_parameters(self, item: Item) -> None:
        """Raise :class:`RecipeError` where an optimizer trains a parameter that belongs to no module of the recipe."""
        in_modules = {id(parameter) for parameter in self.root.parameters()}
        shapes = []
        for group in item.value.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in in_modules:
                    shapes.append(tuple(parameter.shape))
        if shapes:
            raise RecipeError(
                "an optimizer trains parameters of a module that is not part of the saved state",
                where=f"attribute {item.name!r}",
                value=f"{len(shapes)} parameter(s), the first of shape {list(shapes[0])}",
                hint="add their module to the state (an attribute of a recipe), so that it is saved too",
            )


def optimizer_tree(
    item: Item, items: Iterable[Item], owners: Owners, *, create: bool = False
) -> ValueDict:
    """The state of an optimizer and of its LR schedulers, by attribute name.

    The state of a scheduler is in a tuple, which DCP stores whole (it would turn the integer keys of a MultiStepLR into
    text). A parameter that was never updated has no state, unless *create* is true.
    """
    tree: ValueDict = {item.name: {}}
    for other in items:
        if other.owner == item.name:
            tree[other.name] = (other.value.state_dict(),)
    state = None
    if create:
        with _state_creation(item):
            state = owners.optimizer_state(item)
    if state is None:
        with _no_state_creation(item.value):
            state = owners.optimizer_state(item)
    if not create:
        check_flat(item.name, state)
    tree[item.name] = state
    return tree


@contextmanager
def _no_state_creation(optimizer: Optimizer) -> Iterator[None]:
    """Prevent PyTorch from creating missing optimizer state: it would do so by a step, which counts."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not parameters:
        yield
        return
    # PyTorch creates state only for an optimizer without any.
    optimizer.state[parameters[0]] = {}
    try:
        yield
    finally:
        del optimizer.state[parameters[0]]


@contextmanager
def _state_creation(item: Item) -> Iterator[None]:
    """Let PyTorch create the state of all parameters in the block.

    It creates state for all parameters or for none, and for none where one has a gradient. A gradient would belong to
    weights other than those that are read. It creates state by a step with a closure, which not every optimizer
    accepts. A step that fails ends the block, and leaves the optimizer without state. The steps of LBFGS (needs losses)
    and SparseAdam (needs sparse gradients) fail.
    """
    optimizer = item.value
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if len(optimizer.state) < len(trained):
        optimizer.state.clear()
        for parameter in trained:
            parameter.grad = None
    rates = [{"lr": group["lr"]} if "lr" in group else {} for group in optimizer.param_groups]
    step = optimizer.step
    # LR schedulers replace step on the instance; what they have set must be restored.
    instance_step = vars(optimizer).get("step")
    arguments = inspect.signature(step).parameters.values()
    if not any(a.name == "closure" or a.kind is a.VAR_KEYWORD for a in arguments):
        # torch 2.13 calls step(closure=None) to create the state.
        optimizer.step = lambda closure: step()
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        log.debug("%s has no state before the load: %r", item.name, error)
        optimizer.state.clear()
        # PyTorch has set both before the step.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group.update(rate)
        for parameter in trained:
            parameter.grad = None
    finally:
        vars(optimizer).pop("step", None)
        if instance_step is not None:
            optimizer.step = instance_step
