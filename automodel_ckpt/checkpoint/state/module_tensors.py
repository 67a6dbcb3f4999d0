"""State dicts of modules and of their optimizers under names that every strategy and world size shares (FQNs).

A checkpoint stores an optimizer's state flat, by text names. Containers of tensors within it are rejected, and values
that PyTorch would not load unchanged. Its LR schedulers use the same names.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.files.dtypes import dtype_code
from automodel_ckpt.checkpoint.files.layout import BUFFERS, FROZEN
from automodel_ckpt.checkpoint.files.type_aliases import Shape, TextDict, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.parts.discovery import ADD_TO_STATE, Item
from automodel_ckpt.checkpoint.state.storable import (
    check_safe,
    is_sharded,
    local_box,
    local_tensor,
)
from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger("automodel_ckpt")


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


# ---------------------------------------------------------------- optimizers


_OF_ALL = ".state.*."


def check_flat(name: str, state: Values) -> None:
    """Raise :class:`RecipeError` for values in the state of the optimizer *name* that flat names cannot express."""
    for prefix, entry in entries_of(name, state):
        for key, value in entry.items():
            if key == "params":
                continue
            if type(key) is not str or "." in key or _is_container(value):
                raise RecipeError(
                    "an optimizer's state cannot be stored: it is not flat",
                    where=f"{prefix}.{key}",
                    value=f"the key {key!r}, {type(value).__module__}.{type(value).__qualname__}",
                    hint="keep tensors, numbers, text and tuples under text keys without dots, or leave the state out "
                    "(checkpoint.save_optimizer: false)",
                )


def entries_of(name: str, state: Values) -> Iterator[tuple[str, ValueDict]]:
    """Yield the entries of all parameters and groups, each with the prefix of its flat names."""
    for fqn, entry in state["state"].items():
        yield f"{name}.state.{fqn}", entry
    for number, group in enumerate(state["param_groups"]):
        yield f"{name}.param_groups.{number}", group


def _is_container(value: Any) -> bool:
    """Whether DCP flattens a value: a mapping, or a list with a tensor in it. It stores other values as one."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list):
        return False
    # Must agree with traverse_state_dict of torch.distributed.checkpoint (2.13), which flattens the
    # state: a different answer gives names that no saved value has.
    return any(isinstance(element, torch.Tensor) or _is_container(element) for element in value)


def digests_of_own(name: str, optimizer: Optimizer) -> TextDict:
    """Digests of what an optimizer stores unsharded for sharded parameters, by entry name, over all parameters.

    It is stored once, so it must be the same on all ranks (:func:`check_consistent`).
    """
    hashes: dict[str, xxhash.xxh3_128] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if not is_sharded(parameter):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if key == "step" or is_sharded(value):
                continue
            entry = f"{name}{_OF_ALL}{key}"
            hashed = hashes.setdefault(entry, xxhash.xxh3_128())
            hashed.update(check_safe(name, value).encode())
    return {entry: hashed.hexdigest() for entry, hashed in hashes.items()}


def check_consistent(digests: Sequence[Texts]) -> None:
    """Raise :class:`RecipeError` where the results of :func:`digests_of_own` differ between ranks."""
    for key, digest in digests[0].items():
        if _OF_ALL not in key:
            continue
        if any(of_rank.get(key) != digest for of_rank in digests):
            raise RecipeError(
                "an optimizer keeps different state on each rank for sharded parameters",
                where=key,
                value="it differs between the ranks",
                hint="compute it from the whole parameter (a DTensor), "
                "or do not shard it (distributed.strategy: ddp)",
            )


Groups = list[dict[str, torch.Tensor]]
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

    def parameters(self, item: Item, state: Values) -> dict[str, torch.Tensor]:
        """The parameters of this rank's optimizer by FQN; *state* is the result of :meth:`optimizer_state`."""
        found: dict[str, torch.Tensor] = {}
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
                hint=ADD_TO_STATE,
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
