"""Reduce a model to one stage of a pipeline, without changing the names of its modules.

The modules of other stages are replaced by modules that return their input. So the forward of the model still does
everything between the layers (masks, positions, the kind of attention of a layer), from token ids on the first stage
and from hidden states (``inputs_embeds``) on the others. On all stages but the last, the logits that it returns are the
hidden states.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.forward import last_layer_output

log = logging.getLogger(__name__)

_WHERE = "distributed.pp_size"
_ENDS = ("embed_tokens", "norm")


class PassThrough(nn.Module):
    """Takes the place of a module of another stage, and returns its first argument."""

    def forward(self, given: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return *given* unchanged."""
        return given


def layers_of(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of a stage. Each stage gets the same number of layers; the first stages get one of the remainder."""
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def check_stages(model: nn.Module, num_stages: int) -> None:
    """Validate that *model* can be split into *num_stages* stages, before it has weights.

    The model must be built like Llama and Qwen, and must not change hidden states outside of its embedding, layers,
    last norm and output layer, which a forward pass without these shows. Raises :class:`RecipeError`.
    """
    if reason := _unsupported_reason(model):
        raise RecipeError(
            "pipeline parallelism supports only models built like Llama and Qwen",
            where=_WHERE,
            value=f"{num_stages}; {type(model).__name__}: {reason}",
            hint="remove pp_size: fsdp2 shards any model",
        )
    num_layers = len(_inner(model).layers)
    if num_layers < num_stages:
        raise RecipeError(
            "there are more pipeline stages than layers",
            where=_WHERE,
            value=f"{num_stages}; the model has {num_layers} layers",
            hint=f"set it to {num_layers} or less",
        )


def keep_stage(model: nn.Module, stage: int, num_stages: int) -> None:
    """Replace the modules of *model* that belong to other stages than *stage* (from 0), in place, before sharding.

    If the output layer is tied to the embedding, the first and the last stage have both.
    """
    inner, transformers_model = _inner(model), _any(model)
    is_first, is_last, tied = stage == 0, stage == num_stages - 1, has_tied_ends(model)
    mine = layers_of(len(inner.layers), stage, num_stages)
    for number in range(len(inner.layers)):
        if number not in mine:
            # Replaced, not removed: the other layers keep their numbers, and so their names in
            # checkpoints.
            inner.layers[number] = PassThrough()
    if not (is_first or (is_last and tied)):
        inner.embed_tokens = PassThrough()
    if not is_last:
        inner.norm = PassThrough()
        transformers_model.lm_head = PassThrough()


def has_tied_ends(model: nn.Module) -> bool:
    """Whether the output layer and the embedding are one parameter."""
    weight = getattr(_any(model).lm_head, "weight", None)
    return weight is not None and weight is getattr(_inner(model).embed_tokens, "weight", None)


def parameters_of_stages(model: nn.Module, num_stages: int) -> Iterator[list[nn.Parameter]]:
    """The parameters of each stage of a complete *model*, without duplicates."""
    inner, head = _inner(model), _any(model).lm_head
    for stage in range(num_stages):
        modules = [inner.layers[i] for i in layers_of(len(inner.layers), stage, num_stages)]
        if stage == 0:
            modules.append(inner.embed_tokens)
        if stage == num_stages - 1:
            modules += [inner.norm, head]
        found: dict[int, nn.Parameter] = {}
        for module in modules:
            found.update((id(parameter), parameter) for parameter in module.parameters())
        yield list(found.values())


def _any(model: nn.Module) -> Any:
    return model


def _inner(model: nn.Module) -> Any:
    """The model without its output layer."""
    return getattr(model, "base_model", None)


def _unsupported_reason(model: nn.Module) -> str:
    """Why the model cannot be split into stages; empty if it can."""
    inner = _inner(model)
    if not inner:
        return "it has no list of layers"
    names = [f"{model.base_model_prefix}.{name}" for name in (*_ENDS, "layers")]
    names.append("lm_head")
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            return f"it has no {name}"
    if not isinstance(inner.layers, nn.ModuleList):
        return "it has no list of layers"
    prefixes = tuple(f"{name}." for name in names)
    for name, _ in model.named_parameters():
        if not name.startswith(prefixes):
            return f"it has parameters elsewhere ({name})"
    return "" if _passes_through(model) else "it modifies hidden states outside of its layers"


def _passes_through(model: nn.Module) -> bool:
    """Whether the model without its layers, embedding, norm and output layer returns hidden states unchanged."""
    shell = _shell(model)
    width = model.config.get_text_config().hidden_size  # type: ignore[operator,union-attr]
    hidden = torch.arange(3.0 * width).sin().reshape(1, 3, width)
    positions = torch.arange(3).unsqueeze(0)
    try:
        with torch.no_grad():
            output = shell(inputs_embeds=hidden, position_ids=positions, use_cache=False)
    except Exception as error:
        log.debug(
            "could not probe the model for pipeline stages: %s: %s", type(error).__name__, error
        )
        return False
    # Exact: a model that scales hidden states outside of its layers (Gemma 2, Granite) would do so
    # on every stage.
    return torch.equal(last_layer_output(output), hidden)


def _shell(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU without the modules of stages. Its buffers are zeros: the values do not matter."""
    inner = _inner(model)
    # deepcopy uses these objects instead of copies.
    replacements: dict[int, Any] = {
        id(inner.layers): nn.ModuleList(PassThrough() for _ in inner.layers),
        id(_any(model).lm_head): PassThrough(),
    }
    for name in _ENDS:
        replacements[id(getattr(inner, name))] = PassThrough()
    shell: nn.Module = copy.deepcopy(model, replacements)
    for module in shell.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return shell
