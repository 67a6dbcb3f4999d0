"""Load a state dict by stored names into a module: :func:`set_module_state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.formats.description import local_tensor
from automodel_ckpt.checkpoint.state.module_tensors import (
    StoredLayout,
    adapter_keys,
    model_state_dict,
    stored_layout,
    unwrap,
)

_STANDARD_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def set_module_state(
    module: nn.Module,
    state: Mapping[str, Any],
    tied: Mapping[str, str],
    *,
    strict: bool,
    layout: StoredLayout | None = None,
) -> None:
    """Load a *state* into a *module*: what ``module_state`` (``checkpoint/state/module_tensors.py``) returned.

    *tied* and *layout* are those of that call. With *strict*, a missing or unknown name is an error of torch.
    Nothing is left to do where the module's own tensors have the values already, because they were read in place.
    """
    layout = layout or stored_layout(module)
    if _was_read_in_place(unwrap(module), state, tied, layout):
        return
    loaded = dict(state)
    for name, kept in tied.items():
        if kept in state and name not in layout.copies:
            loaded[name] = state[kept]
    present = model_state_dict(module)
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


def _customizes_loading(module: nn.Module) -> bool:
    """Whether loading does more to *module* than to copy values into its parameters and buffers."""
    for method in _STANDARD_METHODS:
        is_overridden = getattr(type(module), method) is not getattr(nn.Module, method)
        if method in vars(module) or is_overridden:
            return True
    # Those of fsdp2 free gathered parameters before a load, as the hook of state_dict() did, and note the memory of a
    # parameter after it, which is the same.
    hooks = [
        *module._load_state_dict_pre_hooks.values(),
        *module._load_state_dict_post_hooks.values(),
    ]
    return not all(hook.__module__.startswith("torch.distributed.fsdp.") for hook in hooks)


def _is_same_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Whether both are the same elements of the same memory; false for tensors of unknown types."""
    if isinstance(value, DTensor) and isinstance(tensor, DTensor):
        value, tensor = local_tensor(value), local_tensor(tensor)
    if type(value) not in _PLAIN_TENSORS or type(tensor) not in _PLAIN_TENSORS:
        return False
    # torch compares no tensors without memory.
    if value.is_meta or tensor.is_meta:
        return False
    return bool(value.is_set_to(tensor))
