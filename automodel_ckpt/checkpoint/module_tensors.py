"""State dicts of modules under names that every strategy and world size shares (FQNs)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
    """The tensors that ranks with different parts of a module (pipeline stages, experts) store together.

    *tensors* are without memory, by stored name and in the module's own order; *tied* maps left-out names to kept
    names. Such a module has it in its attribute ``whole``, so that names, shapes and dtypes are compared without
    communication.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> Whole:
        """The tensors of a complete *module*, from which no part has been removed yet."""
        state, tied = module_state(module)
        return cls(
            {
                name: outline(value)
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            },
            tied,
        )


def keep_whole(module: nn.Module) -> None:
    """Record all tensors of a module before its shards hold different tensors of files."""
    if _parts_in_files(module):
        module.whole = Whole.of(module)  # type: ignore[assignment]


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def whole_of(module: nn.Module) -> Whole | None:
    """The tensors that all ranks store of a module; None where each rank has all of them."""
    whole: Whole | None = getattr(unwrap(module), "whole", None)
    return whole


def whole_state(module: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """(state, tied names) of a module on all ranks, as in :func:`module_state`; other ranks' tensors have no memory."""
    (state, tied), whole = module_state(module), whole_of(module)
    return (state, tied) if whole is None else ({**whole.tensors, **state}, whole.tied)


RowPart = tuple[int, tuple[slice, ...]]
"""A row of a tensor, and what of that row."""


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
    kept.update(
        (name, fqn)
        for fqn in state
        if fqn in parts
        for name in _rows_here(fqn, state[fqn], parts[fqn])
    )
    return kept, {named.get(fqn, fqn): named.get(to, to) for fqn, to in tied.items()}


def stored_values(
    module: nn.Module, state: Mapping[str, Any], kept: Mapping[str, str]
) -> dict[str, Any]:
    """What a module's *state* has for each stored name (of :func:`stored_names`); of rows a view."""
    parts = _parts_in_files(module)
    rows = {fqn: _local_rows(state[fqn]) for fqn in parts if fqn in state}
    return {
        name: state[fqn] if fqn not in rows else _view(*rows[fqn], parts[fqn][name])
        for name, fqn in kept.items()
    }


def _rows_here(fqn: str, value: torch.Tensor, parts: Mapping[str, RowPart]) -> Iterator[str]:
    """The *parts* of a tensor that this rank holds."""
    if isinstance(value, DTensor) and any(
        p.is_shard() and not p.is_shard(0) for p in value.placements
    ):
        raise RecipeError(
            "experts are sharded across ranks, but a checkpoint stores each expert whole",
            where="distributed.tp_plan",
            value=f"{fqn}: {value.placements}",
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

    peft itself chooses and names (``get_peft_model_state_dict``). Its attribute ``save_embedding_layers``, where there
    is one, says whether the base's embeddings are among them though nothing trains them.
    """
    # A PeftModel cannot be at hand without the library; importing it takes a second.
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(module, PeftModel):
        return None
    tokens = {fqn: object() for fqn in state}
    fqns = {id(token): fqn for fqn, token in tokens.items()}
    name = module.active_adapters[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = get_peft_model_state_dict(
            module,
            tokens,
            name,
            save_embedding_layers=bool(module.__dict__.get("save_embedding_layers", False)),
        )
    # Resized embeddings are named once more, with all in them, where they are trained as a whole too.
    twice = (".original_module.", ".modules_to_save.")
    return {
        fqns[id(token)]: key
        for key, token in named.items()
        if not any(part in key for part in twice)
    }


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
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return _tied(module, ((name, tensor) for name, tensor in tensors if name in present))


def _tied(module: nn.Module, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    declared = set(
        getattr(module, "all_tied_weights_keys", None)
        or getattr(module, "_tied_weights_keys", None)
        or ()
    )
    tied: dict[str, str] = {}
    for group in names.values():
        kept = next((name for name in group if name not in declared), group[0])
        tied.update({name: kept for name in group if name != kept})
    return tied


def set_module_state(
    module: nn.Module, state: Mapping[str, Any], tied: Mapping[str, str], *, strict: bool
) -> None:
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
