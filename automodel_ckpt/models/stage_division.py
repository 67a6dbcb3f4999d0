"""Whether and where a model can be divided into pipeline stages: the plan of transformers says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

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
