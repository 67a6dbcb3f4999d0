"""State dicts of modules and optimizers under names that every strategy and world size shares (FQNs)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.adapter import adapter_keys
from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.errors import RecipeError


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside a ``DistributedDataParallel`` wrapper, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def module_state(module: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """A module's persistent state by FQN (tensors are the live ones), each memory once; and what was left out as tied.

    Returns (state dict, {left-out name: kept name}). Of names that share a tensor the first in the module's own order
    is kept, unless the module says otherwise (transformers' ``_tied_weights_keys``). A module whose tensors have other
    names in files says so in its attribute ``names_in_files``; those are the names here. Of a PEFT model it is only
    what its adapter file holds, under the names it has there: the base is not the checkpoint's.
    """
    state = dict(get_model_state_dict(module))
    kept, tied = stored_names(module, state)
    return {name: state[fqn] for name, fqn in kept.items()}, tied


def stored_names(module: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """({name it is stored under: its FQN}, {left-out name: kept name}) of a module's *state*; see above."""
    keys = adapter_keys(unwrap(module), state)
    if keys is not None:
        return {key: fqn for fqn, key in keys.items()}, {}
    tied = tied_names(unwrap(module), state)
    named = _names_in_files(module)
    kept = {named.get(fqn, fqn): fqn for fqn in state if fqn not in tied}
    return kept, {named.get(fqn, fqn): named.get(to, to) for fqn, to in tied.items()}


def name_in_files(module: nn.Module, fqn: str) -> str:
    """What checkpoints call the tensor *fqn* of a module."""
    return _names_in_files(module).get(fqn, fqn)


def _names_in_files(module: nn.Module) -> Mapping[str, str]:
    names: Mapping[str, str] = getattr(unwrap(module), "names_in_files", {})
    return names


def tied_names(module: nn.Module, state: Iterable[str]) -> dict[str, str]:
    """{name: the name it is tied to} for all but one of the names under which the module holds the same tensor."""
    names: dict[int, list[str]] = {}
    present = set(state)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if name in present:
            names.setdefault(id(tensor), []).append(name)
    declared = set(getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None) or ())
    tied: dict[str, str] = {}
    for group in names.values():
        kept = next((name for name in group if name not in declared), group[0])
        tied.update({name: kept for name in group if name != kept})
    return tied


def set_module_state(module: nn.Module, state: Mapping[str, Any], tied: Mapping[str, str], *, strict: bool) -> None:
    """Hand a loaded state (of :func:`module_state`'s form) to the module."""
    whole = {**state, **{name: state[kept] for name, kept in tied.items() if kept in state}}
    keys = adapter_keys(unwrap(module), get_model_state_dict(module))
    if keys is not None:
        # The base's tensors are not there.
        own, strict = {fqn: whole[key] for fqn, key in keys.items() if key in whole}, False
    else:
        fqns = {name: fqn for fqn, name in _names_in_files(module).items()}
        own = {fqns.get(name, name): value for name, value in whole.items()}
    set_model_state_dict(module, own, options=StateDictOptions(strict=strict))


class Owners:
    """The recipe's modules under one roof, so that an optimizer over several of them has unambiguous FQNs:
    ``model.layers.0.weight`` of the attribute ``model`` is ``model.model.layers.0.weight`` here."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.roof = nn.Module()
        for item in items:
            if item.kind == "module":
                # Module names may not hold dots.
                self.roof.add_module(item.name.replace(".", "%"), item.value)

    def optimizer_state(self, item: Item) -> dict[str, Any]:
        """``{"state": {fqn: {...}}, "param_groups": [...]}``; where there is no state at all, it is created first."""
        self._refuse_strangers(item)
        return dict(get_optimizer_state_dict(self.roof, item.value))

    def set_optimizer_state(self, item: Item, state: Mapping[str, Any]) -> None:
        """What *state* has none for has none afterwards."""
        set_optimizer_state_dict(self.roof, item.value, dict(state), options=StateDictOptions(strict=False))

    def _refuse_strangers(self, item: Item) -> None:
        known = {id(parameter) for parameter in self.roof.parameters()}
        mine = [parameter for group in item.value.param_groups for parameter in group["params"]]
        strangers = [tuple(parameter.shape) for parameter in mine if id(parameter) not in known]
        if strangers:
            raise RecipeError(
                "an optimizer trains parameters of no module that the recipe keeps in an attribute",
                where=f"recipe attribute {item.name!r}",
                value=f"{len(strangers)} parameter(s), the first of shape {list(strangers[0])}",
                remedy="keep their module in an attribute of the recipe, so that it is saved too",
            )


def optimizer_tree(item: Item, items: Iterable[Item], owners: Owners, *, create: bool = False) -> dict[str, Any]:
    """An optimizer's state and that of its LR schedulers; theirs in a tuple, which DCP keeps whole (it would turn the
    integer keys of a MultiStepLR into text).

    A parameter that was never updated has none, unless it is to be *create*d, to be read into.
    """
    schedulers = {i.name: (i.value.state_dict(),) for i in items if i.owner == item.name}
    with _emptied_if_partial(item.value) if create else _as_it_is(item.value):
        return {item.name: owners.optimizer_state(item), **schedulers}


@contextmanager
def _as_it_is(optimizer: Optimizer) -> Iterator[None]:
    """Inside, PyTorch makes no state for an optimizer that has none: it would do so by a step, which counts."""
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    if optimizer.state or first is None:
        yield
        return
    optimizer.state[first] = {}
    try:
        yield
    finally:
        del optimizer.state[first]


@contextmanager
def _emptied_if_partial(optimizer: Optimizer) -> Iterator[None]:
    """PyTorch makes state for all parameters or for none, and for none where one has a gradient, which would be that of
    other weights than those to be read."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if len(optimizer.state) < len(trained):
        optimizer.state.clear()
        for parameter in trained:
            parameter.grad = None
    yield
