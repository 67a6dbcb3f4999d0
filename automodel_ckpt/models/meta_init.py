"""Initial values for models that are built on the meta device and sharded first: no rank stores a complete model.

``_init_weights`` of transformers initializes all weights that files do not contain. It is called here for a second copy
of the model on the meta device, not sharded. Its modules get memory one at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

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
