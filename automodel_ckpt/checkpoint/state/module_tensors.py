"""State dicts of modules under names that every strategy and world size shares (FQNs)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.checkpoint.files.dtypes import dtype_code
from automodel_ckpt.checkpoint.files.layout import BUFFERS, FROZEN
from automodel_ckpt.checkpoint.files.type_aliases import Shape, TextDict, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.formats.description import is_sharded, local_box, local_tensor
from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from peft import PeftModel


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside a ``DistributedDataParallel`` wrapper, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


RowPart = tuple[int, tuple[slice, ...]]
"""The number of a row of a tensor, and an index into that row."""


@dataclass(frozen=True, slots=True)
class CompleteTensors:
    """All tensors that the ranks store together of a module with parts on different ranks (stages, experts).

    *tensors* have no memory; they are by stored name and in the module's own order. *tied* maps the names that are left
    out to the names that are stored. *frozen* are the stored names of the parameters that do not train. With it each
    rank compares names, shapes and dtypes without communication.
    """

    tensors: Mapping[str, Tensor]
    tied: Texts
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How files store a module's tensors, where that differs from memory."""

    names: Texts = field(default_factory=dict)
    """{FQN: name in files}; tensors that are not here are stored under their FQN."""
    rows: Mapping[str, Mapping[str, RowPart]] = field(default_factory=dict)
    """{FQN: {name in files: part}} of tensors that files store row by row (experts)."""
    copies: Texts = field(default_factory=dict)
    """{name in files: stored name} of tensors that files have a second time: tied names, which no load fills."""
    complete: CompleteTensors | None = None
    """The tensors of all ranks. It is None when each rank has (a shard of) every tensor."""

    def name_of(self, fqn: str) -> str:
        """The name that checkpoints store the tensor *fqn* under."""
        return self.names.get(fqn, fqn)


_UNCHANGED = StoredLayout()
_PLAIN_TENSORS = (Tensor, nn.Parameter)

# The names under which torch.compile, activation checkpointing and FSDP 1 register the module that they wrap. The FQNs
# of PyTorch do not contain them.
_WRAPPED_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def has_plain_names(module: nn.Module) -> bool:
    """Whether the FQNs of a module's state are the names that its ``state_dict()`` has: nothing inside is wrapped.

    PyTorch finds each FQN by a walk through the modules, and several times. With 10,000 tensors, that takes longer than
    writing them.
    """
    for part in module.modules():
        if isinstance(part, DistributedDataParallel) or hasattr(type(part), "_fqn_modifiers"):
            return False
        if not _WRAPPED_NAMES.isdisjoint(part._modules):
            return False
    return True


def model_state_dict(module: nn.Module, *, detached: bool = True) -> ValueDict:
    """The state of a module by FQN, as PyTorch's ``get_model_state_dict`` returns it.

    Without *detached*, parameters may be in it themselves: nothing may write into them.
    """
    inner = unwrap(module)
    if not has_plain_names(inner):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(module))
    with torch.no_grad():
        # Detaching thousands of DTensors takes as long as writing them.
        return dict(inner.state_dict(keep_vars=not detached))


def set_stored_layout(module: nn.Module, layout: StoredLayout) -> None:
    """Make :func:`stored_layout` return *layout* for *module*.

    A checkpointer gets modules by attribute name from any user's recipe, so the layout has to travel with the module:
    this attribute, which only these two functions access, is the one place where it is recorded.
    """
    module._stored_layout = layout  # type: ignore[assignment]


def stored_layout(module: nn.Module) -> StoredLayout:
    """How files store the tensors of *module*; as in memory unless :func:`set_stored_layout` recorded otherwise."""
    return getattr(unwrap(module), "_stored_layout", _UNCHANGED)


def record_complete_tensors(module: nn.Module) -> None:
    """Record all tensors of a *module* in its layout, before it is divided among the ranks."""
    state, tied = module_state(module)
    tensors = {
        name: without_memory(value) for name, value in state.items() if isinstance(value, Tensor)
    }
    complete = CompleteTensors(tensors, tied, frozen_names(module))
    set_stored_layout(module, replace(stored_layout(module), complete=complete))


def module_state(
    module: nn.Module, layout: StoredLayout | None = None, *, detached: bool = True
) -> tuple[ValueDict, TextDict]:
    """A module's persistent state by stored name, each memory once: (state dict of the live tensors, {tied name that is
    left out: stored name}).

    *detached* is as for :func:`model_state_dict`. *layout* replaces the module's :func:`stored_layout`. If
    several names share a tensor, the first one in the module's own order is stored, unless the module declares another
    (transformers' ``_tied_weights_keys``). If rows are separate tensors in files (experts), a rank has the rows of its
    shard. The state of a PEFT model is only the content of its adapter file, under the names in that file.
    """
    layout = layout or stored_layout(module)
    state = model_state_dict(module, detached=detached)
    kept, tied = stored_names(module, state, layout)
    return stored_values(state, kept, layout), tied


class TensorSpec(NamedTuple):
    """A tensor of the model: safetensors dtype code and global shape."""

    dtype: str
    shape: Shape


def tensor_specs(model: Any) -> dict[str, TensorSpec]:
    """The tensors that a checkpoint stores of a *model*, sharded or not, by FQN."""
    state, _ = complete_state(model)
    return {
        fqn: TensorSpec(dtype_code(str(value.dtype)), tuple(value.shape))
        for fqn, value in state.items()
        if isinstance(value, Tensor)
    }


def untrained_names(module: nn.Module) -> TextDict:
    """{stored name: kind} of the tensors of *module* that do not train.

    The kind is ``layout.FROZEN`` for parameters without a gradient, which do not change, and ``layout.BUFFERS`` for
    buffers, which may. Names of tensors that are not stored are among them.
    """
    inner = unwrap(module)
    layout = stored_layout(module)
    kinds = {name: BUFFERS for name, _ in inner.named_buffers(remove_duplicate=False)}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            kinds[name] = FROZEN
    names = {}
    for fqn, kind in kinds.items():
        for name in (layout.name_of(fqn), *layout.rows.get(fqn, ())):
            names[name] = kind
    return names


def frozen_names(module: nn.Module) -> frozenset[str]:
    """The stored names of the parameters of *module* that do not train, with those that only other ranks have."""
    here = [name for name, kind in untrained_names(module).items() if kind == FROZEN]
    complete = stored_layout(module).complete
    return frozenset(here) if complete is None else complete.frozen.union(here)


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype on the meta device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def complete_state(
    module: nn.Module, here: tuple[Values, Texts] | None = None
) -> tuple[Values, Texts]:
    """(state, tied names) of a module on all ranks, as in :func:`module_state`; other ranks' tensors have no memory.

    *here* is the result of :func:`module_state`, if the caller has it.
    """
    state, tied = here or module_state(module)
    complete = stored_layout(module).complete
    if complete is None:
        return state, tied
    return {**complete.tensors, **state}, complete.tied


def stored_names(
    module: nn.Module, state: Values, layout: StoredLayout | None = None
) -> tuple[TextDict, TextDict]:
    """({stored name: FQN}, {left-out name: stored name}) of a module's *state*, as in :func:`module_state`."""
    keys = adapter_keys(unwrap(module), state)
    if keys is not None:
        return {key: fqn for fqn, key in keys.items()}, {}
    layout = layout or stored_layout(module)
    tied = _tied_names(unwrap(module), state)
    kept = {}
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


def stored_values(state: Values, kept: Texts, layout: StoredLayout) -> ValueDict:
    """The value of a module's *state* for each stored name (of :func:`stored_names`); rows are views."""
    local_rows = {fqn: _local_rows(state[fqn]) for fqn in layout.rows if fqn in state}
    values = {}
    for name, fqn in kept.items():
        if fqn in local_rows:
            rows, first = local_rows[fqn]
            row, columns = layout.rows[fqn][name]
            values[name] = rows[row - first][columns]
        else:
            values[name] = state[fqn]
    return values


def _rows_here(fqn: str, value: Tensor, parts: Mapping[str, RowPart]) -> Iterator[str]:
    """The names of the *parts* (rows) of a tensor that are in this rank's shard.

    Raises :class:`RecipeError` where the tensor is sharded in another dimension.
    """
    placements = value.placements if is_sharded(value) else ()
    if any(placement.is_shard() and not placement.is_shard(0) for placement in placements):
        raise RecipeError(
            "experts are sharded across ranks, but a checkpoint stores each expert whole",
            where="distributed.tp_plan",
            value=f"{fqn}: {placements}",
            hint="remove the experts from the plan (fsdp2 shards them)",
        )
    local, first = _local_rows(value)
    return (name for name, (row, _) in parts.items() if 0 <= row - first < len(local))


def _local_rows(value: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a tensor, and the number of the first."""
    box = local_box(value)
    return local_tensor(value).detach(), box.offsets[0] if box is not None else 0


def is_adapted(module: object) -> TypeGuard[PeftModel]:
    """Return whether *module* is a ``PeftModel``."""
    # There is none where peft is not imported yet, and importing it takes a second.
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(module, PeftModel)


def adapter_keys(module: nn.Module, state: Values) -> TextDict | None:
    """{FQN: key in ``adapter_model.safetensors``} of a ``PeftModel`` with this state dict; None for other modules.

    peft selects and names them (``get_peft_model_state_dict``). The module's attribute ``save_embedding_layers``, where
    there is one, decides whether the base's embeddings are among them even if nothing trains them.
    """
    if not is_adapted(module):
        return None
    from peft import get_peft_model_state_dict

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
    keys = {}
    for key, token in named.items():
        if not any(part in key for part in duplicates):
            keys[fqns[id(token)]] = key
    return keys


def _tied_names(module: nn.Module, state: Values) -> TextDict:
    """{name: the name it is tied to} for all but one of the names in *state* of the same elements of the same memory.

    Tensors that share a part of their memory are not tied.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if name in state:
            groups.setdefault(_elements_of(tensor), []).append(name)
    declared = set(
        getattr(module, "all_tied_weights_keys", None)
        or getattr(module, "_tied_weights_keys", None)
        or ()
    )
    tied = {}
    for members in groups.values():
        stored = next((name for name in members if name not in declared), members[0])
        for name in members:
            if name != stored:
                tied[name] = stored
    return tied


def _elements_of(tensor: Tensor) -> Any:
    """A value that is equal for tensors with the same elements of the same memory.

    It is the identity of a tensor that has no memory that it can share.
    """
    # Tensors of other types, such as DTensors, may have no memory, or another one than they state.
    # parallelize_module silently unties weights (torch 2.13): tie them again after it.
    is_plain = type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided
    # The address is 0 for the meta device and for released memory.
    if not is_plain or not tensor.numel() or not tensor.data_ptr():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
