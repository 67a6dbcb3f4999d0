"""The parts of a model that are sharded separately: its decoder layers, its embeddings and its output layer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, none inside of another.

    These are the modules of the classes in ``_no_split_modules``, or else the elements of the longest ModuleList with
    elements that can be called. For an encoder-decoder, these are the elements of both parts.
    """
    modules = list(model.modules())
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in modules if type(module).__name__ in names]
    if not layers:
        parts: list[Any] = [model]
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True:
            parts = [model.get_encoder(), model.get_decoder()]  # type: ignore[operator]
        for part in parts:
            lists = [list(module) for module in part.modules() if isinstance(module, nn.ModuleList)]
            # A ModuleDict or a ModuleList cannot be called.
            callable_lists = [
                each
                for each in lists
                if all(type(item).forward is not nn.Module.forward for item in each)
            ]
            longest: list[nn.Module] = max(callable_lists, key=len, default=[])
            layers += longest
    inner: set[int] = set()
    for layer in layers:
        inner.update(id(part) for part in layer.modules() if part is not layer)
    return [layer for layer in layers if id(layer) not in inner]


def untied_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that share no parameter with other modules. Sharding a block separately breaks such a tie.

    A block with the input embedding, as in ModernBERT, is none of them: multimodal models call the embedding
    without the block.
    """
    uses_in_model = _num_uses(model)
    return [layer for layer in layers_after_input(model) if _is_untied(layer, uses_in_model)]


def layers_after_input(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks without those that contain the input embedding."""
    embedding = _end_of(model, "get_input_embeddings")
    layers = decoder_layers(model)
    return [layer for layer in layers if all(part is not embedding for part in layer.modules())]


def _end_of(model: Any, name: str) -> nn.Module | None:
    """What the method *name* of *model* returns. None when there is no such method, or it does not state the module."""
    try:
        end: nn.Module | None = getattr(model, name, lambda: None)()
    except NotImplementedError:
        # A model of transformers that does not state its embedding.
        return None
    return end


def separate_ends(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules of the input embedding and of the output layer that fsdp2 gathers separately.

    These are the ones larger than a decoder layer, which would otherwise stay gathered for a whole step with the rest
    of the model. Gathering a smaller one separately saves little memory and costs two more collectives a step. A module
    that shares a parameter with others is never separate. If peft trains a copy of one, these are the copy and the
    original.
    """
    layers = layers_after_input(model)
    layer_parts = {id(part) for layer in layers for part in layer.modules()}
    size_of_layer = max(map(_num_elements, layers), default=0)
    uses_in_model = _num_uses(model)
    ends: list[list[nn.Module]] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        ends.append([])
        end = _end_of(model, name)
        if name == "get_output_embeddings" and isinstance(end, nn.Embedding):
            # The embedding of a decoder. The model may read its type before it calls it.
            continue
        for module in _copies(end):
            is_large = _num_elements(module) > size_of_layer
            if is_large and id(module) not in layer_parts and _is_untied(module, uses_in_model):
                ends[-1].append(module)
    embeddings, heads = ends
    return embeddings, [module for module in heads if module not in embeddings]


def _num_elements(module: nn.Module) -> int:
    """The number of elements of all parameters of *module*, on all ranks together."""
    return sum(parameter.numel() for parameter in module.parameters())


def _copies(module: nn.Module | None) -> list[nn.Module]:
    """The modules in peft's wrapper of a module that is trained in full, else *module*; none without parameters."""
    copies = getattr(module, "modules_to_save", None)
    if module is None or next(module.parameters(), None) is None:
        return []
    if not isinstance(copies, nn.ModuleDict):
        return [module]
    original: Any = module.original_module
    return [original, *copies.values()]


def _is_untied(module: nn.Module, uses_in_model: Counter[int]) -> bool:
    uses = _num_uses(module)
    return all(uses_in_model[key] == count for key, count in uses.items())


def _num_uses(module: nn.Module) -> Counter[int]:
    """How often each parameter, by its id, occurs in *module*."""
    counts: Counter[int] = Counter()
    for part in module.modules():
        counts.update(id(parameter) for parameter in part.parameters(recurse=False))
    return counts
