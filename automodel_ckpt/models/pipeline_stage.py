"""Reduce a model to some stages of a pipeline, without changing the names of its modules.

The modules of other stages are replaced by stand-ins. So the forward of the model still does everything around the
layers (masks, positions, the kind of attention of a layer). A stage other than the first gets the hidden states of the
stage before through the stand-in of the layer before its own. Whatever the model computes before that layer
(scaled embeddings, learned positions) has no effect. A stage other than the last keeps the input of the layer after its
own, and the forward of the model returns it in place of the logits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.forward import (
    class_and_message,
    forward_parameters,
    model_without_adapters,
)

log = logging.getLogger(__name__)

_WHERE = "distributed.pp_size"


class PassThrough(nn.Module):
    """Takes the place of a module of another stage, and returns its first argument."""

    returns_tuple = False
    """Whether the model expects a tuple, whose first element are the hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument unchanged."""
        return self.result(_first(args, kwargs))

    def result(self, hidden: Any) -> Any:
        """Return *hidden* as the replaced module would."""
        return (hidden,) if self.returns_tuple else hidden


class NoEmbedding(PassThrough):
    """Takes the place of an embedding (of positions, for example) of width N: returns zeros [1, 1, N]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros on the device of the first argument."""
        return torch.zeros(1, 1, self.width, device=_first(args, kwargs).device)


class StageInput(PassThrough):
    """Takes the place of the layer before a stage, and returns the hidden states that the stage received."""

    received: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received hidden states, once."""
        assert self.received is not None, "a stage runs without the hidden states of the one before"
        hidden, self.received = self.received, None
        return self.result(hidden)


class StageOutput(PassThrough):
    """Takes the place of the layer after a stage, and keeps the hidden states that the stage computed."""

    computed: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the first argument and return it."""
        self.computed = _first(args, kwargs)
        return self.result(self.computed)

    def take(self) -> torch.Tensor:
        """Return the hidden states of the latest forward pass, once."""
        assert self.computed is not None
        hidden, self.computed = self.computed, None
        return hidden


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


# ---------------------------------------------------------------- where a model can be divided


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


def _list_of(base: nn.Module, decoder: Decoder) -> nn.ModuleList:
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
            _take_place(stand_in, layer, returns_tuple)
            stand_in.register_forward_pre_hook(self._note_layer, with_kwargs=True)
        # deepcopy uses these objects instead of copies.
        replacements: dict[int, Any] = {
            id(base.get_submodule(layers)): nn.ModuleList(self._layers),
            id(base.get_input_embeddings()): NoEmbedding(1),  # type: ignore[operator]
        }
        for name in outside:
            stand_in = _stand_in(base.get_submodule(name))
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


def _stand_in(module: nn.Module) -> PassThrough:
    """The stand-in of a module outside of the layers."""
    if isinstance(module, nn.Embedding):
        return NoEmbedding(module.embedding_dim)
    return PassThrough()


def _take_place(stand_in: PassThrough, layer: nn.Module, returns_tuple: bool) -> None:
    """Make *stand_in* look like *layer* to the model: what it returns, and plain attributes such as
    ``attention_type``."""
    stand_in.returns_tuple = returns_tuple
    for name, value in vars(layer).items():
        if isinstance(value, (str, int, float)) and name != "training":
            setattr(stand_in, name, value)


def _copy_without_values(base: nn.Module, replacements: dict[int, Any]) -> nn.Module:
    """Copy *base* with *replacements* by id to the CPU. Its buffers are zeros: the values do not matter."""
    shell: nn.Module = copy.deepcopy(base, replacements)
    for module in shell.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return shell.eval()


# ---------------------------------------------------------------- the stages of a rank


class LocalStages:
    """The stages of a pipeline that one rank computes, as a model that has their modules only."""

    def __init__(self, model: nn.Module, decoder: Decoder, stages: Sequence[int], num_stages: int):
        """Reduce *model* in place to the *stages* of *num_stages*, before it is sharded.

        A rank with several stages computes one at a time: a forward pass sees the stand-ins of the others.
        """
        self.stages = tuple(stages)
        self._base = model_without_adapters(model)
        self.num_stages = num_stages
        self._last = num_stages - 1
        self._current = 0
        self._views = [_View(self._base, decoder, stage, num_stages) for stage in stages]
        _remove_other_stages(self._base, decoder, stages, num_stages)
        self._restore: dict[str, nn.Module] = {}
        # After the hooks of fsdp2, which looks for the modules that it sharded before the first forward pass.
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)

    @property
    def is_last(self) -> bool:
        """Whether the current stage computes the logits."""
        return self.stages[self._current] == self._last

    def select(self, number: int) -> None:
        """Make the stage *number* of this rank (from 0) the one that forward passes compute."""
        self._current = number

    def receive(self, hidden: torch.Tensor, length: int) -> torch.Tensor:
        """Pass *hidden* states [B, t, H] of the stage before to the next forward pass.

        Returns what the model gets as ``inputs_embeds`` [B, *length*, H], from which it makes masks and positions. The
        lengths differ if context parallel ranks divide the rows.
        """
        stage_input = self._views[self._current].input
        assert stage_input is not None
        stage_input.received = hidden
        return hidden.new_zeros(1, 1, 1).expand(len(hidden), length, hidden.shape[-1])

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        for name, module in self._views[self._current].modules.items():
            self._restore[name] = self._base.get_submodule(name)
            _replace(self._base, name, module)

    def _leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        for name, module in self._restore.items():
            _replace(self._base, name, module)
        self._restore.clear()
        stage_output = self._views[self._current].output
        # None: the forward pass failed.
        if stage_output is None or output is None:
            return output
        return CausalLMOutput(logits=stage_output.take())


class _View:
    """The modules that a forward pass of one stage sees in place of those of the rank."""

    def __init__(self, base: nn.Module, decoder: Decoder, stage: int, num_stages: int) -> None:
        layers = _list_of(base, decoder)
        mine = layers_of(len(layers), stage, num_stages)
        self.input = StageInput() if stage > 0 else None
        self.output = StageOutput() if stage < num_stages - 1 and mine.stop < len(layers) else None
        seen: list[nn.Module] = []
        for number, layer in enumerate(layers):
            if number in mine:
                seen.append(layer)
                continue
            stand_in: PassThrough = PassThrough()
            if number == mine.start - 1 and self.input is not None:
                stand_in = self.input
            elif number == mine.stop and self.output is not None:
                stand_in = self.output
            _take_place(stand_in, layer, decoder.returns_tuple)
            seen.append(stand_in)
        self.modules: dict[str, nn.Module] = {decoder.layers: nn.ModuleList(seen)}
        others = [] if stage == 0 else list(decoder.before)
        if stage < num_stages - 1:
            others += decoder.after
        for name in others:
            self.modules[name] = _stand_in(base.get_submodule(name))


def keep_stages(model: nn.Module, stages: Sequence[int], num_stages: int) -> LocalStages:
    """Replace the modules of *model* that belong to other stages than *stages* (from 0), in place, before sharding.

    If the output layer is tied to the embedding, the first and the last stage have both. The model must have passed
    :func:`check_stages`.
    """
    return LocalStages(model, find_decoder(model_without_adapters(model)), stages, num_stages)


def _remove_other_stages(
    base: nn.Module, decoder: Decoder, stages: Sequence[int], num_stages: int
) -> None:
    layers = _list_of(base, decoder)
    mine: set[int] = set()
    for stage in stages:
        mine.update(layers_of(len(layers), stage, num_stages))
    # Before modules are replaced, which would hide the tie.
    kept = _kept_outside(base, decoder, stages, num_stages)
    for number in range(len(layers)):
        if number not in mine:
            # Replaced, not removed: the other layers keep their numbers, and so their names in
            # checkpoints.
            layers[number] = PassThrough()
    for name in (*decoder.before, *decoder.after):
        if name not in kept:
            _replace(base, name, PassThrough())


def _kept_outside(
    base: nn.Module, decoder: Decoder, stages: Sequence[int], num_stages: int
) -> set[str]:
    """The names of the modules outside of the layers that these stages have."""
    kept: set[str] = set()
    if 0 in stages:
        kept.update(decoder.before)
    if num_stages - 1 in stages:
        kept.update(decoder.after)
        if has_tied_ends(base):
            kept.add(decoder.before[0])
    return kept


def _replace(base: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    # Not setattr: this runs before and after every forward pass.
    base.get_submodule(parent)._modules[key] = module


def has_tied_ends(model: nn.Module) -> bool:
    """Whether the output layer and the embedding are one parameter."""
    base = model_without_adapters(model)
    weight = getattr(base.get_output_embeddings(), "weight", None)
    return weight is not None and weight is getattr(base.get_input_embeddings(), "weight", None)


def parameters_of_ranks(
    model: nn.Module, num_ranks: int, stages_per_rank: int = 1
) -> Iterator[list[nn.Parameter]]:
    """The parameters of each rank of a pipeline of a complete *model*, without duplicates."""
    base = model_without_adapters(model)
    decoder = find_decoder(base)
    layers = _list_of(base, decoder)
    num_stages = num_ranks * stages_per_rank
    for rank in range(num_ranks):
        stages = stages_of(rank, num_ranks, stages_per_rank)
        modules: list[nn.Module] = []
        for stage in stages:
            modules += [layers[number] for number in layers_of(len(layers), stage, num_stages)]
        for name in (*decoder.before, *decoder.after):
            if name in _kept_outside(base, decoder, stages, num_stages):
                modules.append(base.get_submodule(name))
        found: dict[int, nn.Parameter] = {}
        for module in modules:
            found.update((id(parameter), parameter) for parameter in module.parameters())
        yield list(found.values())


def stages_of(rank: int, num_ranks: int, stages_per_rank: int) -> range:
    """The stages of a rank of the pipeline: every *num_ranks*-th one."""
    return range(rank, num_ranks * stages_per_rank, num_ranks)
