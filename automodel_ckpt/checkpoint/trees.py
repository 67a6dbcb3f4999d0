"""State dicts of modules and optimizers under names that every strategy and world size shares (FQNs)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.state.adapter import adapter_keys
from automodel_ckpt.checkpoint.state.optimizer_state import FORMS, forms_of
from automodel_ckpt.errors import RecipeError


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside a ``DistributedDataParallel`` wrapper, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def module_state(module: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """A module's persistent state by FQN (tensors are the live ones), each memory once; and what was left out as tied.

    Returns (state dict, {left-out name: kept name}). Of names that share a tensor the first in the module's own order
    is kept, unless the module says otherwise (transformers' ``_tied_weights_keys``). A module whose tensors have other
    names in files says so in its attribute ``names_in_files``; those are the names here. Rows that are in files tensors
    of their own (experts) are here too, as the attribute ``parts_in_files`` says; each rank has those that it holds. Of
    a PEFT model it is only what its adapter file holds, under the names it has there: the base is not the checkpoint's.
    """
    state = dict(get_model_state_dict(module))
    kept, tied = stored_names(module, state)
    return stored_values(module, state, kept), tied


@dataclass(frozen=True, slots=True)
class Whole:
    """What the ranks that hold different parts of a module (stages of a pipeline, experts) store of it together.

    *tensors* are without memory, by stored name and in the module's own order; *tied* as of :func:`module_state`. Such
    a module has it in its attribute ``whole``: names, shapes and dtypes can be compared without asking other ranks.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> Whole:
        """Of a module of which nothing has been taken away yet."""
        state, tied = module_state(module)
        return cls({name: _outline(value) for name, value in state.items() if isinstance(value, torch.Tensor)}, tied)


def keep_whole(module: nn.Module) -> None:
    """Where shards of a module will hold different tensors of files, have it know them all; call it before."""
    if _parts_in_files(module):
        module.whole = Whole.of(module)  # type: ignore[assignment]


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def whole_of(module: nn.Module) -> Whole | None:
    """What the ranks store of a module together; None where each of them has all of its names."""
    whole: Whole | None = getattr(unwrap(module), "whole", None)
    return whole


def whole_state(module: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """As :func:`module_state`, but of all that the ranks hold of the module; what others have is without memory."""
    (state, tied), whole = module_state(module), whole_of(module)
    return (state, tied) if whole is None else ({**whole.tensors, **state}, whole.tied)


RowPart = tuple[int, tuple[slice, ...]]
"""A row of a tensor, and what of that row."""

Groups = list[dict[str, torch.Tensor]]
"""For each of an optimizer's parameter groups, {FQN: a tensor without memory} of what it trains."""


def trained_by_all(optimizer: Optimizer) -> Groups | None:
    """What the ranks whose optimizers train different parameters train together, under the names of :class:`Owners`;
    None where they all train the same. Such an optimizer has it in its attribute ``whole``."""
    groups: Groups | None = getattr(optimizer, "whole", None)
    return groups


def stored_names(
    module: nn.Module, state: Mapping[str, Any], tensors: Iterable[tuple[str, Any]] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """({name it is stored under: its FQN}, {left-out name: kept name}) of a module's *state*; see above.

    *tensors*: the module's own, by name, where they are at hand; looking for them takes longer than all else.
    """
    keys = adapter_keys(unwrap(module), state)
    if keys is not None:
        return {key: fqn for fqn, key in keys.items()}, {}
    tied = tied_names(unwrap(module), state) if tensors is None else _tied(unwrap(module), tensors)
    named = _names_in_files(module)
    parts = _parts_in_files(module)
    kept = {named.get(fqn, fqn): fqn for fqn in state if fqn not in tied and fqn not in parts}
    kept.update((name, fqn) for fqn in state if fqn in parts for name in _rows_here(fqn, state[fqn], parts[fqn]))
    return kept, {named.get(fqn, fqn): named.get(to, to) for fqn, to in tied.items()}


def stored_values(module: nn.Module, state: Mapping[str, Any], kept: Mapping[str, str]) -> dict[str, Any]:
    """What a module's *state* has for each stored name (of :func:`stored_names`); of rows a view."""
    parts = _parts_in_files(module)
    rows = {fqn: _local_rows(state[fqn]) for fqn in parts if fqn in state}
    return {name: state[fqn] if fqn not in rows else _view(*rows[fqn], parts[fqn][name]) for name, fqn in kept.items()}


def _rows_here(fqn: str, value: torch.Tensor, parts: Mapping[str, RowPart]) -> Iterator[str]:
    """The *parts* of a tensor that this rank holds."""
    if isinstance(value, DTensor) and any(p.is_shard() and not p.is_shard(0) for p in value.placements):
        raise RecipeError(
            "experts are cut across ranks, and a checkpoint holds each whole",
            where="distributed.tp_plan",
            value=f"{fqn}: {value.placements}",
            remedy="leave the experts out of the plan (fsdp2 shards them)",
        )
    local, first = _local_rows(value)
    return (name for name, (row, _) in parts.items() if 0 <= row - first < len(local))


def _local_rows(value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a tensor, and the number of the first."""
    if not isinstance(value, DTensor):
        return value.detach(), 0
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local().detach(), offsets[0]


def _view(rows: torch.Tensor, first: int, part: RowPart) -> torch.Tensor:
    row, columns = part
    return rows[row - first][columns]


def name_in_files(module: nn.Module, fqn: str) -> str:
    """What checkpoints call the tensor *fqn* of a module."""
    return _names_in_files(module).get(fqn, fqn)


def _names_in_files(module: nn.Module) -> Mapping[str, str]:
    names: Mapping[str, str] = getattr(unwrap(module), "names_in_files", {})
    return names


def _parts_in_files(module: nn.Module) -> Mapping[str, Mapping[str, RowPart]]:
    parts: Mapping[str, Mapping[str, RowPart]] = getattr(unwrap(module), "parts_in_files", {})
    return parts


def tied_names(module: nn.Module, state: Iterable[str]) -> dict[str, str]:
    """{name: the name it is tied to} for all but one of the names under which the module holds the same tensor."""
    present = set(state)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return _tied(module, ((name, tensor) for name, tensor in tensors if name in present))


def _tied(module: nn.Module, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
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
    present, parts = get_model_state_dict(module), _parts_in_files(module)
    # They are views, and filled.
    rows = {name for its in parts.values() for name in its}
    keys = adapter_keys(unwrap(module), present)
    if keys is not None:
        # The base's tensors are not there.
        own, strict = {fqn: whole[key] for fqn, key in keys.items() if key in whole}, False
    else:
        fqns = {name: fqn for fqn, name in _names_in_files(module).items()}
        own = {fqns.get(name, name): value for name, value in whole.items() if name not in rows}
        own.update((fqn, present[fqn]) for fqn in parts if fqn in present)
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
        """``{"state": {fqn: {...}}, "param_groups": [...]}``; where there is no state at all, it is created first.

        The groups name what all ranks train, the state is this rank's.
        """
        self.refuse_strangers(item)
        state: dict[str, Any] = dict(get_optimizer_state_dict(self.roof, item.value))
        for group, names in zip(state["param_groups"], trained_by_all(item.value) or (), strict=False):
            group["params"] = list(names)
        return state

    def groups(self, item: Item) -> Groups:
        """What this rank's optimizer trains."""
        fqns = {id(parameter): fqn for fqn, parameter in self.roof.named_parameters()}
        return [{fqns[id(p)]: _outline(p) for p in group["params"]} for group in item.value.param_groups]

    def parameters(self, item: Item, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What this rank's optimizer trains, by FQN; *state* is what :meth:`optimizer_state` gave."""
        mine = [list(names) for names in self.groups(item)] if trained_by_all(item.value) is not None else None
        named = mine or [group["params"] for group in state["param_groups"]]
        trained = [group["params"] for group in item.value.param_groups]
        return {fqn: p for names, ps in zip(named, trained, strict=True) for fqn, p in zip(names, ps, strict=True)}

    def set_optimizer_state(self, item: Item, state: Mapping[str, Any]) -> None:
        """What *state* has none for has none afterwards."""
        set_optimizer_state_dict(self.roof, item.value, dict(state), options=StateDictOptions(strict=False))

    def refuse_strangers(self, item: Item) -> None:
        """Raises :class:`RecipeError` where an optimizer trains what no module under the roof has."""
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
    with _made(item) if create else _as_it_is(item.value):
        state = owners.optimizer_state(item)
    if not create and (forms := forms_of(state)):
        state[FORMS] = (forms,)
    return {item.name: state, **schedulers}


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
            "the optimizer does not make its state by a step without gradients",
            where=f"recipe attribute {item.name!r}",
            value=repr(error),
            remedy="let its step() work where all gradients are zero: its state is read into what it makes then",
        ) from error
    finally:
        vars(optimizer).pop("step", None)
        if own is not None:
            optimizer.step = own
