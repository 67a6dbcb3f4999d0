"""State dicts of modules under names that every strategy and world size shares (FQNs)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.errors import RecipeError


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside a ``DistributedDataParallel`` wrapper, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


RowPart = tuple[int, tuple[slice, ...]]
"""The number of a row of a tensor, and an index into that row."""


@dataclass(frozen=True, slots=True)
class CompleteTensors:
    """All tensors that the ranks store together of a module whose parts are on different ranks (stages, experts).

    *tensors* have no memory; they are by stored name and in the module's own order. *tied* maps the names that are left
    out to the names that are stored. With it each rank compares names, shapes and dtypes without communication.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How files store a module's tensors, where that differs from memory."""

    names: Mapping[str, str] = field(default_factory=dict)
    """{FQN: name in files}; tensors that are not here are stored under their FQN."""
    rows: Mapping[str, Mapping[str, RowPart]] = field(default_factory=dict)
    """{FQN: {name in files: part}} of tensors whose rows are separate tensors in files (experts)."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """{name in files: stored name} of tensors that files have a second time: tied names, which no load fills."""
    complete: CompleteTensors | None = None
    """The tensors of all ranks; None if each rank has (a shard of) every tensor."""

    def name_of(self, fqn: str) -> str:
        """The name that checkpoints store the tensor *fqn* under."""
        return self.names.get(fqn, fqn)


_UNCHANGED = StoredLayout()


def set_stored_layout(module: nn.Module, layout: StoredLayout) -> None:
    """Make :func:`stored_layout` return *layout* for *module*.

    A checkpointer gets modules by attribute name from any user's recipe, so the layout has to travel with the module:
    this attribute, which only these two functions access, is the one place where it is recorded.
    """
    module._stored_layout = layout  # type: ignore[assignment]


def stored_layout(module: nn.Module) -> StoredLayout:
    """How files store the tensors of *module*; as in memory unless :func:`set_stored_layout` recorded otherwise."""
    layout: StoredLayout = getattr(unwrap(module), "_stored_layout", _UNCHANGED)
    return layout


def record_complete_tensors(module: nn.Module) -> None:
    """Record all tensors of a *module* in its layout, before it is divided among the ranks."""
    state, tied = module_state(module)
    tensors = {
        name: without_memory(value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    layout = replace(stored_layout(module), complete=CompleteTensors(tensors, tied))
    set_stored_layout(module, layout)


def module_state(
    module: nn.Module, layout: StoredLayout | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """A module's persistent state by stored name, each memory once: (state dict of the live tensors, {tied name that is
    left out: stored name}).

    *layout* replaces the module's :func:`stored_layout`. Of names that share a tensor the first in the module's own
    order is stored, unless the module declares otherwise (transformers' ``_tied_weights_keys``). Of rows that are
    separate tensors in files (experts), a rank has those of its shard. Of a PEFT model only the content of its adapter
    file is state, under the names in that file.
    """
    layout = layout or stored_layout(module)
    state = dict(get_model_state_dict(module))
    kept, tied = stored_names(module, state, layout=layout)
    return stored_values(state, kept, layout), tied


def untrained_names(module: nn.Module) -> dict[str, str]:
    """{stored name: kind} of the tensors of *module* that do not train.

    The kind is ``frozen`` for parameters without a gradient, which do not change, and ``buffers`` for buffers, which
    may. Names of tensors that are not stored are among them.
    """
    inner = unwrap(module)
    layout = stored_layout(module)
    kinds = {name: "buffers" for name, _ in inner.named_buffers(remove_duplicate=False)}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            kinds[name] = "frozen"
    names: dict[str, str] = {}
    for fqn, kind in kinds.items():
        for name in (layout.name_of(fqn), *layout.rows.get(fqn, ())):
            names[name] = kind
    return names


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype on the meta device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def complete_state(
    module: nn.Module, here: tuple[Mapping[str, Any], Mapping[str, str]] | None = None
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """(state, tied names) of a module on all ranks, as in :func:`module_state`; other ranks' tensors have no memory.

    *here* is the result of :func:`module_state`, if the caller has it.
    """
    state, tied = here or module_state(module)
    complete = stored_layout(module).complete
    if complete is None:
        return state, tied
    return {**complete.tensors, **state}, complete.tied


def stored_names(
    module: nn.Module,
    state: Mapping[str, Any],
    tensors: Iterable[tuple[str, Any]] | None = None,
    layout: StoredLayout | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """({stored name: FQN}, {left-out name: stored name}) of a module's *state*, as in :func:`module_state`.

    *tensors* are the module's own by name, if the caller has them; collecting them takes longer than everything else.
    """
    keys = adapter_keys(unwrap(module), state)
    if keys is not None:
        return {key: fqn for fqn, key in keys.items()}, {}
    layout = layout or stored_layout(module)
    tied = tied_names(unwrap(module), state) if tensors is None else _tied(unwrap(module), tensors)
    kept: dict[str, str] = {}
    for fqn in state:
        if fqn not in tied and fqn not in layout.rows:
            kept[layout.name_of(fqn)] = fqn
    for fqn in state:
        if fqn in layout.rows:
            for name in _rows_here(fqn, state[fqn], layout.rows[fqn]):
                kept[name] = fqn
    names = {layout.name_of(fqn): layout.name_of(to) for fqn, to in tied.items()}
    for name, stored in layout.copies.items():
        if stored in kept:
            names[name] = stored
    return kept, names


def stored_values(
    state: Mapping[str, Any], kept: Mapping[str, str], layout: StoredLayout
) -> dict[str, Any]:
    """The value of a module's *state* for each stored name (of :func:`stored_names`); rows are views."""
    local_rows = {fqn: _local_rows(state[fqn]) for fqn in layout.rows if fqn in state}
    values: dict[str, Any] = {}
    for name, fqn in kept.items():
        if fqn in local_rows:
            values[name] = _view(*local_rows[fqn], layout.rows[fqn][name])
        else:
            values[name] = state[fqn]
    return values


def _rows_here(fqn: str, value: torch.Tensor, parts: Mapping[str, RowPart]) -> Iterator[str]:
    """The names of the *parts* (rows) of a tensor that are in this rank's shard.

    Raises :class:`RecipeError` where the tensor is sharded in another dimension.
    """
    placements = value.placements if isinstance(value, DTensor) else ()
    if any(placement.is_shard() and not placement.is_shard(0) for placement in placements):
        raise RecipeError(
            "experts are sharded across ranks, but a checkpoint stores each expert whole",
            where="distributed.tp_plan",
            value=f"{fqn}: {placements}",
            hint="remove the experts from the plan (fsdp2 shards them)",
        )
    local, first = _local_rows(value)
    return (name for name, (row, _) in parts.items() if 0 <= row - first < len(local))


def _local_rows(value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a tensor, and the number of the first."""
    if not isinstance(value, DTensor):
        return value.detach(), 0
    _, offsets = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return value.to_local().detach(), offsets[0]


def _view(rows: torch.Tensor, first: int, part: RowPart) -> torch.Tensor:
    row, columns = part
    return rows[row - first][columns]


def adapter_keys(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str] | None:
    """{FQN: key in ``adapter_model.safetensors``} of a ``PeftModel`` with this state dict; None for other modules.

    peft selects and names them (``get_peft_model_state_dict``). The module's attribute ``save_embedding_layers``, where
    there is one, decides whether the base's embeddings are among them even if nothing trains them.
    """
    # There is no PeftModel where peft is not imported yet, and importing it takes a second.
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(module, PeftModel):
        return None
    # Tokens instead of tensors: peft renames and filters them without reading any.
    tokens = {fqn: object() for fqn in state}
    fqns = {id(token): fqn for fqn, token in tokens.items()}
    name = module.active_adapters[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = get_peft_model_state_dict(
            module,
            tokens,
            name,
            # Not getattr: a PeftModel forwards names that it lacks to the base model.
            save_embedding_layers=bool(module.__dict__.get("save_embedding_layers", False)),
        )
    # Resized embeddings that are also trained are named a second time by peft.
    duplicates = (".original_module.", ".modules_to_save.")
    keys: dict[str, str] = {}
    for key, token in named.items():
        if not any(part in key for part in duplicates):
            keys[fqns[id(token)]] = key
    return keys


def tied_names(module: nn.Module, state: Iterable[str]) -> dict[str, str]:
    """{name: the name it is tied to} for all but one of the names of the same tensor in the module."""
    present = set(state)
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return _tied(module, ((name, tensor) for name, tensor in tensors if name in present))


def _tied(module: nn.Module, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """{name: the name it is tied to} among the names of *tensors* with the same identity."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        # By identity. parallelize_module silently unties weights (torch 2.13): tie them again after
        # it.
        names.setdefault(id(tensor), []).append(name)
    declared = set(
        getattr(module, "all_tied_weights_keys", None)
        or getattr(module, "_tied_weights_keys", None)
        or ()
    )
    tied: dict[str, str] = {}
    for group in names.values():
        stored = next((name for name in group if name not in declared), group[0])
        for name in group:
            if name != stored:
                tied[name] = stored
    return tied


def set_module_state(
    module: nn.Module,
    state: Mapping[str, Any],
    tied: Mapping[str, str],
    *,
    strict: bool,
    layout: StoredLayout | None = None,
) -> None:
    """Load a state that :func:`module_state` returned, with the same *layout*, into the module.

    Nothing is left to do where the module's own tensors have the values already, because they were read in place.
    """
    layout = layout or stored_layout(module)
    if _was_read_in_place(unwrap(module), state, tied, layout):
        return
    loaded = dict(state)
    for name, kept in tied.items():
        if kept in state and name not in layout.copies:
            loaded[name] = state[kept]
    present = get_model_state_dict(module)
    keys = adapter_keys(unwrap(module), present)
    if keys is not None:
        own = {fqn: loaded[key] for fqn, key in keys.items() if key in loaded}
        # The tensors of the base are not in the state.
        strict = False
    else:
        # Rows are views into the module's own tensors: their values were written in place.
        row_names = {name for parts in layout.rows.values() for name in parts}
        fqns = {name: fqn for fqn, name in layout.names.items()}
        own = {
            fqns.get(name, name): value for name, value in loaded.items() if name not in row_names
        }
        own.update((fqn, present[fqn]) for fqn in layout.rows if fqn in present)
    set_model_state_dict(module, own, options=StateDictOptions(strict=strict))


def _was_read_in_place(
    module: nn.Module, state: Mapping[str, Any], tied: Mapping[str, str], layout: StoredLayout
) -> bool:
    """Whether *state* contains all persistent tensors of *module* in their own memory, and loading does nothing else.

    ``load_state_dict`` searches all names in a list of modules for each of its modules. With 10,000, that takes longer
    than reading the tensors.
    """
    tensors = _standard_tensors(module)
    if tensors is None or layout.rows:
        return False
    remaining = set(tensors)
    fqns = {name: fqn for fqn, name in layout.names.items()}
    for name, value in state.items():
        fqn = fqns.get(name, name)
        if fqn not in tensors or not _is_same_memory(value, tensors[fqn]):
            return False
        remaining.discard(fqn)
    for name in tied:
        remaining.discard(fqns.get(name, name))
    return not remaining


def _standard_tensors(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """The parameters and persistent buffers of *module* by FQN; None if a module inside changes what loading does."""
    tensors: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if _customizes_loading(part):
            return None
        prefix = f"{path}." if path else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                tensors[prefix + name] = parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                tensors[prefix + name] = buffer
    return tensors


_STANDARD_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


def _customizes_loading(module: nn.Module) -> bool:
    """Whether loading does more to *module* than to copy values into its parameters and buffers."""
    for method in _STANDARD_METHODS:
        if method in vars(module) or getattr(type(module), method) is not getattr(
            nn.Module, method
        ):
            return True
    for hook in module._load_state_dict_pre_hooks.values():
        # That of fsdp2 frees gathered parameters, as the hook of state_dict() did.
        if not hook.__module__.startswith("torch.distributed.fsdp."):
            return True
    return bool(module._load_state_dict_post_hooks)


def _is_same_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Whether both are the same elements of the same memory; false for tensors of unknown types."""
    if isinstance(value, DTensor) and isinstance(tensor, DTensor):
        value, tensor = value.to_local(), tensor.to_local()
    if type(value) not in _PLAIN_TENSORS or type(tensor) not in _PLAIN_TENSORS:
        return False
    # torch compares no tensors without memory.
    if value.is_meta or tensor.is_meta:
        return False
    return bool(value.is_set_to(tensor))


_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
