"""Whether and where a model can be divided into pipeline stages: a forward pass of a copy with stand-ins shows it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.forward import (
    class_and_message,
    forward_parameters,
    model_without_adapters,
)
from automodel_ckpt.models.stage_stand_ins import (
    NoEmbedding,
    PassThrough,
    StageInput,
    StageOutput,
    stand_in_for,
    take_place,
)

log = logging.getLogger(__name__)

_WHERE = "distributed.pp_size"


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of a model that stages divide among themselves, by module name."""

    layers: str
    """The ModuleList of the decoder layers."""
    before: tuple[str, ...]
    """Modules with parameters that are called before the layers: the embedding first."""
    after: tuple[str, ...]
    """Modules with parameters that are called after the layers: the output layer last."""
    elsewhere: tuple[str, ...]
    """Modules with parameters that are not called; they stay on every rank."""
    returns_tuple: bool
    """Whether layers return a tuple."""


class _Unsupported(Exception):
    """The reason why a model cannot be divided into stages."""


def layers_of(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of a stage. Each stage gets the same number of layers; the first stages get one of the remainder."""
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def check_stages(model: nn.Module, num_stages: int) -> None:
    """Validate that *model* can be divided into *num_stages* stages, before it has weights.

    The model must be a list of layers, each of which gets the output of the layer before and nothing else that depends
    on the tokens; a forward pass with stand-ins shows whether it does. Raises :class:`RecipeError`.
    """
    base = model_without_adapters(model)
    try:
        num_layers = len(base.get_submodule(_layers_name(base)))
        if num_layers < num_stages:
            raise RecipeError(
                "there are more pipeline stages than layers",
                where=_WHERE,
                value=f"{num_stages} stages; layers of the model: {num_layers}",
                hint="lower pp_size, or pp_stages_per_rank if it is set",
            )
        decoder = find_decoder(base)
        if decoder.elsewhere:
            raise _Unsupported(f"it has parameters elsewhere ({decoder.elsewhere[0]})")
    except _Unsupported as error:
        raise RecipeError(
            "this model cannot be divided into pipeline stages",
            where=_WHERE,
            value=f"{num_stages} stages; {type(base).__name__}: {error}",
            hint="remove pp_size: fsdp2 shards any model",
        ) from error


def find_decoder(base: nn.Module) -> Decoder:
    """Find the decoder layers of a transformers model, and the modules that are called before and after them.

    The model must have passed :func:`check_stages`, which reports what is not supported.
    """
    layers = _layers_name(base)
    outside = _outside(base, layers)
    embedding = _name_of(base, base.get_input_embeddings(), outside, "input embedding")  # type: ignore[operator]
    head = _name_of(base, base.get_output_embeddings(), outside, "output layer")  # type: ignore[operator]
    reason = ""
    for returns_tuple in (False, True):
        probe = _Probe(base, layers, [name for name in outside if name != embedding], returns_tuple)
        try:
            before, after = probe.called_around_layers()
        except _Unsupported as error:
            # The reason of the first attempt: almost all models return tensors.
            reason = reason or str(error)
            continue
        others = [name for name in after if name != head]
        elsewhere = sorted(set(outside) - {embedding, head, *before, *after})
        return Decoder(
            layers, (embedding, *before), (*others, head), tuple(elsewhere), returns_tuple
        )
    raise _Unsupported(reason)


def list_of_layers(base: nn.Module, decoder: Decoder) -> nn.ModuleList:
    """Return the decoder layers of *base*."""
    layers = base.get_submodule(decoder.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def _layers_name(base: nn.Module) -> str:
    """The name of the ModuleList with the most parameters, which is inside of no other one."""
    sizes: dict[str, int] = {}
    for name, module in base.named_modules():
        is_nested = any(name.startswith(f"{other}.") for other in sizes)
        if isinstance(module, nn.ModuleList) and not is_nested:
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    if not sizes:
        raise _Unsupported("it has no list of layers")
    return max(sizes, key=lambda name: sizes[name])


def _outside(base: nn.Module, layers: str) -> list[str]:
    """The names of the modules with parameters that contain no layer and are in none, none inside of another."""
    found = []
    path = layers.split(".")
    for depth in range(len(path)):
        prefix = "".join(f"{part}." for part in path[:depth])
        module = base.get_submodule(prefix.removesuffix("."))
        for name, _ in module.named_parameters(recurse=False):
            raise _Unsupported(f"it has parameters elsewhere ({prefix}{name})")
        for name, child in module.named_children():
            if name != path[depth] and any(True for _ in child.parameters()):
                found.append(f"{prefix}{name}")
    return found


def _name_of(base: nn.Module, wanted: nn.Module | None, names: Sequence[str], what: str) -> str:
    for name in names:
        if wanted is not None and base.get_submodule(name) is wanted:
            return name
    raise _Unsupported(f"its {what} is not beside its layers")


class _Probe:
    """A copy of a model on the CPU, in which stand-ins take the place of layers and of all modules with parameters."""

    def __init__(
        self, base: nn.Module, layers: str, outside: Sequence[str], returns_tuple: bool
    ) -> None:
        self._calls: list[str] = []
        self._values: list[torch.Tensor] = []
        real = list(base.get_submodule(layers).children())
        self._input, self._output = StageInput(), StageOutput()
        between: list[PassThrough] = [PassThrough() for _ in real[1:-1]]
        self._layers = [self._input, *between, self._output]
        for stand_in, layer in zip(self._layers, real, strict=True):
            take_place(stand_in, layer, returns_tuple)
            stand_in.register_forward_pre_hook(self._note_layer, with_kwargs=True)
        # deepcopy uses these objects instead of copies.
        replacements: dict[int, Any] = {
            id(base.get_submodule(layers)): nn.ModuleList(self._layers),
            id(base.get_input_embeddings()): NoEmbedding(1),  # type: ignore[operator]
        }
        for name in outside:
            stand_in = stand_in_for(base.get_submodule(name))
            stand_in.register_forward_pre_hook(partial(self._note, name))
            replacements[id(base.get_submodule(name))] = stand_in
        self._shell = _copy_without_values(base, replacements)
        self._config: Any = base.config
        self._shape = torch.Size()

    def called_around_layers(self) -> tuple[list[str], list[str]]:
        """The names of the modules that are called before the first layer, and after the last one.

        Raises :class:`_Unsupported` if the hidden states change between the layers, if the model calls a module between
        them, or if layers get other values that depend on the tokens.
        """
        first = self._run(1.0)
        calls = list(self._calls)
        second = self._run(2.0)
        if len(first) != len(second) or not all(map(torch.equal, first, second)):
            raise _Unsupported("its layers get more than hidden states from the layers before")
        positions = [number for number, name in enumerate(calls) if name == _LAYER]
        start = positions[0]
        stop = positions[-1] + 1
        are_consecutive = positions == list(range(start, stop))
        if not are_consecutive or len(positions) != len(self._layers):
            raise _Unsupported("it calls other modules between its layers")
        return calls[:start], calls[stop:]

    def _run(self, scale: float) -> list[torch.Tensor]:
        """Run a few tokens, whose embeddings are multiplied by *scale*; returns the other arguments of the layers."""
        self._calls.clear()
        self._values.clear()
        width = self._config.get_text_config().hidden_size
        hidden = torch.arange(3.0 * width).sin().reshape(1, 3, width)
        self._input.received = hidden
        try:
            with torch.no_grad():
                self._shell(inputs_embeds=scale * hidden, **_probe_options(self._shell))
        except Exception as error:
            log.debug("could not probe the model for pipeline stages", exc_info=True)
            raise _Unsupported(
                f"it cannot run without layers ({class_and_message(error)})"
            ) from error
        # Exact: a model that changes hidden states between its layers would do so again on every stage.
        if self._output.computed is None or not torch.equal(self._output.take(), hidden):
            raise _Unsupported("it modifies hidden states outside of its layers")
        if self._shape != hidden.shape:
            raise _Unsupported("its layers get hidden states of another shape than its embeddings")
        return list(self._values)

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        self._calls.append(name)

    def _note_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append(_LAYER)
        given, *others = [*args, *kwargs.values()]
        if module is self._input:
            self._shape = given.shape
        self._values += _tensors_in(others)


_LAYER = "a layer"


def _probe_options(model: nn.Module) -> dict[str, Any]:
    """The arguments of a forward pass of three tokens besides their embeddings, as far as the model has them."""
    parameters = forward_parameters(model)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    options: dict[str, Any] = {}
    if takes_all or "use_cache" in parameters:
        options["use_cache"] = False
    if "position_ids" in parameters:
        options["position_ids"] = torch.arange(3).unsqueeze(0)
    if "output_router_logits" in parameters:
        # The loss of the routers needs routers.
        options["output_router_logits"] = False
    return options


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors_in(value)
        elif isinstance(value, Mapping):
            found += _tensors_in(list(value.values()))
    return found


def _copy_without_values(base: nn.Module, replacements: dict[int, Any]) -> nn.Module:
    """Copy *base* with *replacements* by id to the CPU. Its buffers are zeros: the values do not matter."""
    shell: nn.Module = copy.deepcopy(base, replacements)
    for module in shell.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return shell.eval()
