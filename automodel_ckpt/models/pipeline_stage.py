"""Reduce a model to one stage of a pipeline, without changing the names of its modules.

The modules of other stages are replaced by stand-ins. So the forward of the model still does everything around the
layers (masks, positions, the kind of attention of a layer). A stage other than the first gets the hidden states of the
stage before through the stand-in of the layer before its own. Whatever the model computes before that layer
(scaled embeddings, learned positions) has no effect. A stage other than the last keeps the input of the layer after its
own, and the forward of the model returns it in place of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from automodel_ckpt.checkpoint.files.type_aliases import Strings, Values
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import model_without_adapters

_WHERE = "distributed.pp_size"


@dataclass(frozen=True)
class Decoder:
    """The parts of a model that stages divide among themselves, by module name."""

    layers: str
    """The ModuleList of the decoder layers."""
    before: Strings
    """Modules with parameters that are called before the layers: the embedding first."""
    after: Strings
    """Modules with parameters that are called after the layers: the output layer last."""


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
    num_layers = len(list_of_layers(base, find_decoder(base)))
    if num_layers < num_stages:
        raise RecipeError(
            "there are more pipeline stages than layers",
            where=_WHERE,
            value=f"{num_stages} stages; layers of the model: {num_layers}",
            hint="",
        )


def find_decoder(base: Any) -> Decoder:
    """Find the decoder layers of a transformers model, and the modules that are called before and after them.

    Raises :class:`RecipeError` if the model cannot be divided.
    """
    modules = dict(base.named_modules())
    head = base.get_output_embeddings()
    names = [name for name, module in modules.items() if module is head]
    # In the order of their calls, except for the output layer.
    plan = getattr(base, "pp_plan", None) or ()
    parts = [name for name in plan if name not in names]
    layers = [name for name in parts if isinstance(modules.get(name), nn.ModuleList)]
    if len(layers) != 1 or not names or not all(name in modules for name in parts):
        raise _unsupported(base, "transformers has no plan for its stages")
    text = base.config.get_text_config()
    for key in _SHARED_BETWEEN_LAYERS:
        if getattr(text, key, None):
            raise _unsupported(base, f"its layers share values ({key})")
    for name, _ in base.named_parameters():
        if not name.startswith(tuple(f"{part}." for part in (*parts, *names))):
            raise _unsupported(base, f"it has parameters elsewhere ({name})")
    start = parts.index(layers[0])
    after = _with_parameters(base, parts[start + 1 :])
    return Decoder(layers[0], _with_parameters(base, parts[:start]), (*after, names[0]))


_SHARED_BETWEEN_LAYERS = ("num_kv_shared_layers", "hidden_size_per_layer_input", "indexer_types")
"""Settings with which layers get more than the hidden states of the layer before."""


def _unsupported(base: nn.Module, reason: str) -> RecipeError:
    return RecipeError(
        "this model cannot be divided into pipeline stages",
        where=_WHERE,
        value=f"{type(base).__name__}: {reason}",
        hint="remove pp_size: fsdp2 shards any model",
    )


def _with_parameters(base: nn.Module, names: list[str]) -> Strings:
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

    received: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received hidden states, once."""
        assert self.received is not None, "a stage runs without the hidden states of the one before"
        hidden, self.received = self.received, None
        return hidden


class StageOutput(PassThrough):
    """Takes the place of the layer after a stage, and keeps the hidden states that the stage computed."""

    computed: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the first argument and return it."""
        self.computed = _first(args, kwargs)
        return self.computed

    def take(self) -> Tensor:
        """Return the hidden states of the latest forward pass, once."""
        assert self.computed is not None
        hidden, self.computed = self.computed, None
        return hidden


def _first(args: Sequence[Any], kwargs: Values) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


class LocalStage:
    """The stage of a pipeline that one rank computes, as a model that has its modules only."""

    def __init__(self, model: nn.Module, number: int, num_stages: int) -> None:
        """Replace the modules of *model* that belong to other stages than *number* (from 0), in place, before sharding.

        If the output layer is tied to the embedding, the first and the last stage have both. The model must have passed
        :func:`check_stages`.
        """
        self.number, self.num_stages = number, num_stages
        base = model_without_adapters(model)
        decoder = find_decoder(base)
        layers = list_of_layers(base, decoder)
        mine = layers_of(len(layers), number, num_stages)
        self._input = StageInput() if number > 0 else None
        self._output = None if self.is_last or mine.stop == len(layers) else StageOutput()
        # Before modules are replaced, which would hide the tie.
        kept = _kept_outside(base, decoder, number, num_stages)
        for index, layer in enumerate(layers):
            if index in mine:
                continue
            stand_in = PassThrough()
            if index == mine.start - 1 and self._input is not None:
                stand_in = self._input
            elif index == mine.stop and self._output is not None:
                stand_in = self._output
            # The model reads plain attributes of its layers, such as ``attention_type``.
            for name, value in vars(layer).items():
                if isinstance(value, (str, int, float)) and name != "training":
                    setattr(stand_in, name, value)
            # Replaced, not removed: the other layers keep their numbers, and so their names in checkpoints.
            layers[index] = stand_in
        for name in (*decoder.before, *decoder.after):
            if name not in kept:
                module = base.get_submodule(name)
                is_embedding = isinstance(module, nn.Embedding)
                other = NoEmbedding(module.embedding_dim) if is_embedding else PassThrough()
                base.set_submodule(name, other)
        model.register_forward_hook(self._return_hidden)

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the logits."""
        return self.number == self.num_stages - 1

    def receive(self, hidden: Tensor, length: int) -> Tensor:
        """Pass *hidden* states [B, t, H] of the stage before to the next forward pass.

        Returns what the model gets as ``inputs_embeds`` [B, *length*, H], from which it makes masks and positions. The
        lengths differ if context parallel ranks divide the rows.
        """
        assert self._input is not None
        self._input.received = hidden
        return hidden.new_zeros(1, 1, 1).expand(len(hidden), length, hidden.shape[-1])

    def _return_hidden(self, model: nn.Module, args: Any, output: Any) -> Any:
        return output if self._output is None else CausalLMOutput(logits=self._output.take())


def _kept_outside(base: nn.Module, decoder: Decoder, stage: int, num_stages: int) -> set[str]:
    """The names of the modules outside of the layers that a stage has."""
    kept: set[str] = set()
    if stage == 0:
        kept.update(decoder.before)
    if stage == num_stages - 1:
        kept.update(decoder.after)
        if has_tied_ends(base):
            kept.add(decoder.before[0])
    return kept


def has_tied_ends(model: nn.Module) -> bool:
    """Whether the output layer and the embedding are one parameter."""
    base = model_without_adapters(model)
    weight = getattr(base.get_output_embeddings(), "weight", None)
    return weight is not None and weight is getattr(base.get_input_embeddings(), "weight", None)


def parameters_of_stages(model: nn.Module, num_stages: int) -> Iterator[list[nn.Parameter]]:
    """The parameters of each stage of a complete *model*, without duplicates."""
    base = model_without_adapters(model)
    decoder = find_decoder(base)
    layers = list_of_layers(base, decoder)
    for stage in range(num_stages):
        modules = [layers[index] for index in layers_of(len(layers), stage, num_stages)]
        for name in (*decoder.before, *decoder.after):
            if name in _kept_outside(base, decoder, stage, num_stages):
                modules.append(base.get_submodule(name))
        found: dict[int, nn.Parameter] = {}
        for module in modules:
            found.update((id(parameter), parameter) for parameter in module.parameters())
        yield list(found.values())
