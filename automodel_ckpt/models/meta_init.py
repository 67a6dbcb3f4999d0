"""Models on the meta device: initial values for models that are sharded first, and the parts that stay in float32.

No rank stores a complete model. ``_init_weights`` of transformers initializes all weights that files do not contain. It
is called here for a second copy of the model on the meta device, not sharded. Its modules get memory one at a time.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

log = logging.getLogger("automodel_ckpt")

CANNOT_BUILD = (
    ValueError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    KeyError,
    NotImplementedError,
    AssertionError,
)
"""What transformers' and torch's constructors raise; AssertionError: a padding token beyond a smaller vocabulary."""


class InitialValues:
    """The initial values of a transformers model, equal for any number of ranks.

    Each module draws from a separate random stream, seeded by *seed* and the module's name. The distribution is the
    model's. Values are drawn in float32 and rounded to the dtype of the model, so that a frozen copy in bfloat16 starts
    from the values of the trained model. *skeleton* is the model on the meta device; nothing else may use it.
    """

    def __init__(self, skeleton: PreTrainedModel, seed: int) -> None:
        self._modules = dict(skeleton.named_modules())
        self._seed = seed

    def are_complete(self) -> bool:
        """Whether ``_init_weights`` writes every tensor. Values that only a constructor sets are not available here."""
        tensors = [each for m in self._modules.values() for each in _own_tensors(m).values()]
        # torch increments _version with each in-place operation, also on the meta device.
        before = [tensor._version for tensor in tensors]
        with guard_torch_init_functions():
            for name in self._modules:
                self._initialise(name)
        after = [tensor._version for tensor in tensors]
        return all(new > old for new, old in zip(after, before, strict=True))

    def of_module(self, name: str, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The complete initial values, on the CPU, of those direct tensors of the module *name* that are *wanted*.

        *wanted* gets a tensor's name inside of the module. Call it in the context of transformers'
        ``guard_torch_init_functions``.
        """
        module = self._modules[name]
        on_meta = _own_tensors(module)
        if not any(wanted(key) for key in on_meta):
            return {}
        memory: dict[str, Tensor] = {}
        for key, tensor in on_meta.items():
            # Values of 16 bits would have other draws.
            is_small = tensor.dtype in (torch.bfloat16, torch.float16)
            dtype = torch.float32 if is_small else tensor.dtype
            memory[key] = torch.empty_like(tensor, device="cpu", dtype=dtype)
        _replace(module, memory)
        try:
            with torch.random.fork_rng(devices=[]):
                # Only the CPU's generator is restored afterwards, so no other one may be seeded.
                digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
                # torch requires a seed of 63 bits.
                torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
                # Draws for other modules, which are on the meta device, do not advance the CPU's
                # generator: the values depend on this module only.
                for outer in _outwards(name):
                    self._initialise(outer)
            return {
                key: tensor.detach().to(on_meta[key].dtype)
                for key, tensor in _own_tensors(module).items()
                if wanted(key)
            }
        finally:
            _replace(module, on_meta)

    @torch.no_grad()
    def _initialise(self, name: str) -> None:
        """Call ``_init_weights`` of the innermost PreTrainedModel for one module.

        The call for an outer module may change inner modules again (GPT-2's does).
        """
        for outer in _outwards(name):
            owner = self._modules[outer]
            if isinstance(owner, PreTrainedModel):
                owner._init_weights(self._modules[name])  # type: ignore[no-untyped-call]
                return


def _outwards(name: str) -> Iterator[str]:
    """The module's name, and the names of the modules that contain it, up to the model ("")."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The direct parameters and buffers of a module, without its children's."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _replace(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace direct parameters and buffers. nn.Module's setattr is slower and does not accept every replacement."""
    for name, tensor in tensors.items():
        if name in module._buffers:
            module._buffers[name] = tensor
        elif isinstance(tensor, nn.Parameter):
            module._parameters[name] = tensor
        else:
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def on_meta(build: Callable[[], Any]) -> Any:
    """Call *build* with tensors on the meta device, and return its result."""
    with torch.device("meta"):
        return build()


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory on *device* for tensors on the meta device; DTensors get their local shards.

    Tied parameters stay tied. Tensors with values are unchanged.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        without = {name: tensor for name, tensor in _own_tensors(module).items() if tensor.is_meta}
        for tensor in without.values():
            if id(tensor) not in made:
                # Garbage, also in buffers that no file contains (inv_freq): the caller must fill
                # every tensor.
                new = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        _replace(module, {name: made[id(tensor)] for name, tensor in without.items()})
    # fsdp2 detects replaced parameters only in Module._apply.
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


@torch.no_grad()
def initialise(
    modules: Mapping[str, nn.Module],
    values: InitialValues,
    wanted: Callable[[str, nn.Module], Callable[[str], bool]],
) -> None:
    """Copy this rank's shards of the initial values to *modules*.

    *modules* are named and ordered as in the complete model. ``wanted(name, module)`` returns a function that selects
    direct tensors of the module by their names. Tied tensors get the values of their first name.
    """
    done: set[int] = set()
    with guard_torch_init_functions():
        for name, module in modules.items():
            selects = wanted(name, module)
            all_own = _own_tensors(module)
            own = {key: tensor for key, tensor in all_own.items() if id(tensor) not in done}
            done.update(map(id, own.values()))
            selected = {key for key in own if selects(key)}
            for key, complete in values.of_module(name, selected.__contains__).items():
                # Each rank draws the complete tensor and keeps its slice: drawing shards with one
                # seed would give all ranks the same values.
                put(own[key], complete)


def put(target: Tensor, complete: Tensor) -> None:
    """Copy this rank's shard of *complete* to *target*, a tensor of the same global shape."""
    if not isinstance(target, DTensor):
        target.copy_(complete)
        return
    sizes, offsets = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    shard = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    target.to_local().copy_(complete[shard])


def is_transient(module: nn.Module, name: str) -> bool:
    """Whether *name* is a buffer that state dicts, and so files, do not contain."""
    return name in module._non_persistent_buffers_set


_OF_ADAPTERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""What peft inserts into the names of the parameters that it wraps."""
_COMPUTES_IN_ONE_TYPE = ("deberta", "xlnet")
"""Models that create parameters in float32 and cannot compute with them in 16 bits."""
_FACTORS_IN_FILES = re.compile(r"\.(slope_rate|\w+_decay)$")
"""Buffers in files by which MiniMax multiplies activations. Others stay in float32, such as the biases of routers,
which would select other experts."""
_HALF = (torch.bfloat16, torch.float16)


def float32_pattern(model: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """What the names of the parameters and buffers contain that *model* keeps in float32 in a model of type *dtype*.

    ``from_pretrained`` searches names in the same way: the entries of ``_keep_in_fp32_modules_strict``, with float16
    also the entries of ``_keep_in_fp32_modules``, are regular expressions in which ``*`` is any text. None: no name
    does.
    """
    any_model: Any = model
    entries: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        entries.update(getattr(any_model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        entries.update(getattr(any_model, "_keep_in_fp32_modules", None) or ())
    if not entries:
        return None
    return re.compile("|".join(f"(?:{entry.replace('*', '.*')})" for entry in sorted(entries)))


def float32_kept(model: nn.Module) -> dict[str, frozenset[str]]:
    """The names of the parameters and buffers that *model* keeps in float32, by the dtype code of the others.

    Names of layers that are in other stages of a pipeline are among them.
    """
    created: set[str] = set()
    names = _names_in(model)
    # A constructor does not distinguish the types of 16 bits.
    built = _built_in(model, torch.bfloat16)
    if built is not None:
        state = built.state_dict(keep_vars=True)
        created = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
        names |= _names_in(built)
    found: dict[str, frozenset[str]] = {}
    for code, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        pattern = float32_pattern(model, dtype)
        if kept := created | {name for name in names if pattern and pattern.search(name)}:
            found[code] = frozenset(kept)
    return found


def _names_in(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    return names


def float32_names(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """The names of the parameters that *model*, which may have adapters, keeps in float32 if it computes in *dtype*.

    Those that the class of the model creates in float32 in a model of type *dtype* are among them, if it can compute
    with them, and batch normalization with running statistics in float32: torch requires weights of the same type.
    """
    pattern = float32_pattern(model, dtype)
    prefix, inner = _of_transformers(model)
    built = _built_in(inner, dtype) if dtype in _HALF else None
    created: set[str] = set()
    if built is not None and built.config.model_type not in _COMPUTES_IN_ONE_TYPE:
        for name, parameter in built.named_parameters(remove_duplicate=False):
            if parameter.dtype == torch.float32:
                created.add(name)
    found: set[str] = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        plain = _OF_ADAPTERS.sub("", name)
        if (pattern and pattern.search(plain)) or plain.removeprefix(prefix) in created:
            found.add(name)
    for name, module in model.named_modules(remove_duplicate=False):
        mean = getattr(module, "running_mean", None)
        if isinstance(module, _BatchNorm) and mean is not None and mean.dtype == torch.float32:
            found.update(each for each, _ in module.named_parameters(name))
    return frozenset(found)


def _of_transformers(model: nn.Module) -> tuple[str, nn.Module]:
    """The outermost model of transformers in *model*, or itself, and the prefix of the names of its parameters."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return f"{name}." if name else "", module
    return "", model


def constants_in(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """The names of the buffers of *model* that it would create in *dtype* if it were built in this type.

    Those are constants that no file contains, such as tables of positions, and a few factors of activations in files.
    Activations that are computed with one in float32 would be in float32, which layers with weights in *dtype* cannot
    use. Empty for a model that is not of transformers.
    """
    prefix, inner = _of_transformers(model)
    buffers = {name: each.dtype for name, each in inner.named_buffers() if each.is_floating_point()}
    if dtype is None or set(buffers.values()) <= {dtype}:
        return frozenset()
    built = _built_in(inner, dtype)
    if built is None:
        return frozenset()
    in_files = built.state_dict(keep_vars=True)
    created = {
        name: each.dtype
        for name, each in built.named_buffers()
        if name not in in_files or _FACTORS_IN_FILES.search(name)
    }
    tables = {
        prefix + name
        for name, stored in buffers.items()
        if created.get(_OF_ADAPTERS.sub("", name)) == dtype != stored
    }
    return frozenset(tables)


def _built_in(model: nn.Module, dtype: torch.dtype | None) -> PreTrainedModel | None:
    """A model of the class and the config of *model* that is built in *dtype*, without values.

    None when that fails, and for a model that is not of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    config = copy.deepcopy(model.config)
    # The class of a model that fsdp2 has sharded makes one that is not.
    make: Any = type(model)._from_config
    try:
        # A constructor may draw numbers on the CPU in any case.
        with torch.random.fork_rng(devices=[]):
            built: PreTrainedModel = on_meta(lambda: make(config, dtype=dtype))
    except Exception:
        # Whatever the code of a model raises.
        log.debug("the model cannot be built without memory", exc_info=True)
        return None
    return built
