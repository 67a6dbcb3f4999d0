"""Reduce a model to some stages of a pipeline, without changing the names of its modules.

The modules of other stages are replaced by stand-ins. So the forward of the model still does everything around the
layers (masks, positions, the kind of attention of a layer). A stage other than the first gets the hidden states of the
stage before through the stand-in of the layer before its own. Whatever the model computes before that layer
(scaled embeddings, learned positions) has no effect. A stage other than the last keeps the input of the layer after its
own, and the forward of the model returns it in place of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.forward import model_without_adapters

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


class _Unsupported(Exception):
    """The reason why a model cannot be divided into stages."""


def layers_of(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of a stage. Each stage gets the same number of layers; the first stages get one of the remainder."""
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def check_stages(model: nn.Module, num_stages: int) -> None:
    """Validate that *model* can be divided into *num_stages* stages, before it has weights.

    Raises :class:`RecipeError`.
    """
    base = model_without_adapters(model)
    try:
        decoder = find_decoder(base)
    except _Unsupported as error:
        raise RecipeError(
            "this model cannot be divided into pipeline stages",
            where=_WHERE,
            value=f"{num_stages} stages; {type(base).__name__}: {error}",
            hint="remove pp_size: fsdp2 shards any model",
        ) from error
    num_layers = len(list_of_layers(base, decoder))
    if num_layers < num_stages:
        raise RecipeError(
            "there are more pipeline stages than layers",
            where=_WHERE,
            value=f"{num_stages} stages; layers of the model: {num_layers}",
            hint="lower pp_size, or pp_stages_per_rank if it is set",
        )


def find_decoder(base: Any) -> Decoder:
    """Find the decoder layers of a transformers model, and the modules that are called before and after them.

    The model must have passed :func:`check_stages`, which reports what is not supported.
    """
    modules = dict(base.named_modules())
    head = base.get_output_embeddings()
    names = [name for name, module in modules.items() if module is head]
    # In the order of their calls, except for the output layer.
    plan = getattr(base, "pp_plan", None) or ()
    parts = [name for name in plan if name not in names]
    layers = [name for name in parts if isinstance(modules.get(name), nn.ModuleList)]
    if len(layers) != 1 or not names or not all(name in modules for name in parts):
        raise _Unsupported("transformers has no plan for its stages")
    text = base.config.get_text_config()
    for key in _SHARED_BETWEEN_LAYERS:
        if getattr(text, key, None):
            raise _Unsupported(f"its layers share values ({key})")
    for name, _ in base.named_parameters():
        if not name.startswith(tuple(f"{part}." for part in (*parts, *names))):
            raise _Unsupported(f"it has parameters elsewhere ({name})")
    start = parts.index(layers[0])
    after = _with_parameters(base, parts[start + 1 :])
    return Decoder(layers[0], _with_parameters(base, parts[:start]), (*after, names[0]))


_SHARED_BETWEEN_LAYERS = ("num_kv_shared_layers", "hidden_size_per_layer_input", "indexer_types")
"""Settings with which layers get more than the hidden states of the layer before."""


def _with_parameters(base: nn.Module, names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if any(True for _ in base.get_submodule(name).parameters()))


def list_of_layers(base: nn.Module, decoder: Decoder) -> nn.ModuleList:
    """Return the decoder layers of *base*."""
    layers = base.get_submodule(decoder.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


class PassThrough(nn.Module):
    """Takes the place of a module of another stage, and returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument unchanged."""
        return _first(args, kwargs)


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
        return hidden


class StageOutput(PassThrough):
    """Takes the place of the layer after a stage, and keeps the hidden states that the stage computed."""

    computed: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the first argument and return it."""
        self.computed = _first(args, kwargs)
        return self.computed

    def take(self) -> torch.Tensor:
        """Return the hidden states of the latest forward pass, once."""
        assert self.computed is not None
        hidden, self.computed = self.computed, None
        return hidden


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def stand_in_for(module: nn.Module) -> PassThrough:
    """The stand-in of a module outside of the layers."""
    if isinstance(module, nn.Embedding):
        return NoEmbedding(module.embedding_dim)
    return PassThrough()


def take_place(stand_in: PassThrough, layer: nn.Module) -> None:
    """Make *stand_in* look like *layer* to the model, with plain attributes such as ``attention_type``."""
    for name, value in vars(layer).items():
        if isinstance(value, (str, int, float)) and name != "training":
            setattr(stand_in, name, value)


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
        layers = list_of_layers(base, decoder)
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
            take_place(stand_in, layer)
            seen.append(stand_in)
        self.modules: dict[str, nn.Module] = {decoder.layers: nn.ModuleList(seen)}
        others = [] if stage == 0 else list(decoder.before)
        if stage < num_stages - 1:
            others += decoder.after
        for name in others:
            self.modules[name] = stand_in_for(base.get_submodule(name))


def keep_stages(model: nn.Module, stages: Sequence[int], num_stages: int) -> LocalStages:
    """Replace the modules of *model* that belong to other stages than *stages* (from 0), in place, before sharding.

    If the output layer is tied to the embedding, the first and the last stage have both. The model must have passed
    :func:`~automodel_ckpt.models.pipeline_stage.check_stages`.
    """
    return LocalStages(model, find_decoder(model_without_adapters(model)), stages, num_stages)


def _remove_other_stages(
    base: nn.Module, decoder: Decoder, stages: Sequence[int], num_stages: int
) -> None:
    layers = list_of_layers(base, decoder)
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
    layers = list_of_layers(base, decoder)
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
