"""Models that are built without memory, cut up, and only then given values: no rank ever holds a whole one.

transformers builds every model on the meta device when it reads one, and its ``_init_weights`` makes whatever files do
not hold. Both are used here on a second, uncut copy without memory, whose modules get memory one at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions


class InitialValues:
    """The values that a transformers model starts from, the same on any number of ranks.

    Each module draws from a generator of its own, seeded by *seed* and the module's name; the distribution is the
    model's own. *skeleton* is the model on the meta device, used by nothing else.
    """

    def __init__(self, skeleton: PreTrainedModel, seed: int) -> None:
        self._modules = dict(skeleton.named_modules())
        self._seed = seed

    def are_complete(self) -> bool:
        """Whether ``_init_weights`` gives every tensor a value; what only a constructor knows cannot be made here."""
        tensors = [t for module in self._modules.values() for t in _own_tensors(module).values()]
        before = [tensor._version for tensor in tensors]
        with guard_torch_init_functions(), _Touching():
            for name in self._modules:
                self._initialise(name)
        return all(tensor._version > old for tensor, old in zip(tensors, before, strict=True))

    def of_module(self, name: str, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """The whole tensors that the module *name* itself holds and that are *wanted* (by their own names), on the CPU.

        Called under transformers' ``guard_torch_init_functions``.
        """
        module = self._modules[name]
        kept = _own_tensors(module)
        lent = {own: torch.empty_like(tensor, device="cpu") for own, tensor in kept.items()}
        if not any(map(wanted, lent)):
            return {}
        _replace(module, lent)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(
                    _mixed(self._seed, name)
                )  # an accelerator's draws are not ours
                for outer in _outwards(name):
                    self._initialise(outer)
            return {
                own: tensor.detach() for own, tensor in _own_tensors(module).items() if wanted(own)
            }
        finally:
            _replace(module, kept)

    @torch.no_grad()
    def _initialise(self, name: str) -> None:
        """What transformers does to one module; a module further out may go over those inside it (GPT-2's does)."""
        owner = next(self._modules[outer] for outer in _outwards(name) if self._is_model(outer))
        owner._init_weights(self._modules[name])

    def _is_model(self, name: str) -> bool:
        return isinstance(self._modules[name], PreTrainedModel)


class _Touching(TorchFunctionMode):
    """A normal draw without memory, which torch composes of ten operations in Python, becomes one write."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if function in (nn.init.normal_, torch.Tensor.normal_):
            tensor: torch.Tensor = args[0] if args else named["tensor"]
            return tensor.zero_() if tensor.is_meta else function(*args, **named)
        return function(*args, **named)


def _outwards(name: str) -> Iterator[str]:
    """The module's name, and those of all around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _mixed(seed: int, name: str) -> int:
    return (
        int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")
        >> 1
    )


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _replace(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in module._buffers:
            module._buffers[name] = tensor
        else:
            module._parameters[name] = (
                tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
            )


def on_meta(build: Callable[[], Any]) -> Any:
    """What *build* makes, with its tensors on the meta device."""
    with torch.device("meta"):
        return build()


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for what is on the meta device, uninitialised; tied parameters stay tied. Sharded models get their shares.

    What has values keeps them.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        without = {name: tensor for name, tensor in _own_tensors(module).items() if tensor.is_meta}
        for tensor in without.values():
            if id(tensor) not in made:
                new = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        _replace(module, {name: made[id(tensor)] for name, tensor in without.items()})
    # fsdp2 looks for changed parameters when a module is applied to.
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


@torch.no_grad()
def initialise(
    modules: Mapping[str, nn.Module],
    values: InitialValues,
    wanted: Callable[[str, nn.Module], Callable[[str], bool]],
) -> None:
    """Give *modules* (by their names in the uncut model, in its order) their share of the initial values.

    *wanted*, called with a module's name and the module, says which of its own tensors get them. Tensors that are tied
    get those of the first name.
    """
    done: set[int] = set()
    with guard_torch_init_functions():
        for name, module in modules.items():
            own = {
                key: tensor
                for key, tensor in _own_tensors(module).items()
                if id(tensor) not in done
            }
            done.update(id(tensor) for tensor in own.values())
            asked = wanted(name, module)
            for key, whole in values.of_module(name, lambda key: key in own and asked(key)).items():  # noqa: B023
                put(own[key], whole)


def put(target: torch.Tensor, whole: torch.Tensor) -> None:
    """This rank's part of *whole* into *target*, a tensor of the same global shape."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    sizes, offsets = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    part = whole[
        tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    ]
    target.to_local().copy_(part)


def is_transient(module: nn.Module, name: str) -> bool:
    """Whether a tensor is a buffer that no file holds."""
    return name in module._non_persistent_buffers_set
