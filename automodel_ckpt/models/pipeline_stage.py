"""A model of which one stage of a pipeline is left, under the names that everything has in the whole model.

What other stages hold is replaced by modules that hand on what they get. So the model's own forward goes on to do all
that lies between the layers (masks, positions, which kind of attention a layer has), from token ids on the first stage
and from hidden states (``inputs_embeds``) on the others; what it returns as its logits are the hidden states on all
stages but the last.
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
    """Stands where another stage has a module: returns the first thing it gets."""

    def forward(self, given: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """*given*, as it is."""
        return given


def layers_of(num_layers: int, stage: int, num_stages: int) -> range:
    """The numbers of a stage's layers: as many for each stage as can be, and one more for the first of them."""
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def check_stages(model: nn.Module, num_stages: int) -> None:
    """:class:`RecipeError` for a model that cannot be cut into so many stages, before it has any weights.

    It has to be built like Llama and Qwen, and to do nothing to the hidden states outside of its embedding, layers,
    last norm and output layer; what the rest of it does to hidden states is tried.
    """
    if reason := _why_not(model):
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
    """Leave of *model*, in place and before it is shared out, what the *stage* (from 0) holds.

    Of a model whose output layer is tied to its embedding the first and the last stage hold both.
    """
    inner, transformers_model = _inner(model), _any(model)
    is_first, is_last, tied = stage == 0, stage == num_stages - 1, has_tied_ends(model)
    mine = layers_of(len(inner.layers), stage, num_stages)
    for number in range(len(inner.layers)):
        if number not in mine:
            inner.layers[number] = PassThrough()
    if not (is_first or (is_last and tied)):
        inner.embed_tokens = PassThrough()
    if not is_last:
        inner.norm = PassThrough()
        transformers_model.lm_head = PassThrough()


def has_tied_ends(model: nn.Module) -> bool:
    """Whether the output layer's weight is the embedding's."""
    weight = getattr(_any(model).lm_head, "weight", None)
    return weight is not None and weight is getattr(_inner(model).embed_tokens, "weight", None)


def parameters_of_stages(model: nn.Module, num_stages: int) -> Iterator[list[nn.Parameter]]:
    """What each stage would hold of an uncut *model*."""
    inner, head = _inner(model), _any(model).lm_head
    for stage in range(num_stages):
        parts = [inner.layers[number] for number in layers_of(len(inner.layers), stage, num_stages)]
        parts += [inner.embed_tokens] * (stage == 0) + [inner.norm, head] * (
            stage == num_stages - 1
        )
        yield list({id(p): p for part in parts for p in part.parameters()}.values())


def _any(model: nn.Module) -> Any:
    return model


def _inner(model: nn.Module) -> Any:
    """The model without its output layer."""
    return getattr(model, "base_model", None)


def _why_not(model: nn.Module) -> str:
    inner = _inner(model)
    names = (
        [*(f"{model.base_model_prefix}.{name}" for name in (*_ENDS, "layers")), "lm_head"]
        if inner
        else []
    )
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing or not names or not isinstance(inner.layers, nn.ModuleList):
        return f"it has no {missing[0] if missing else 'list of layers'}"
    elsewhere = [
        name
        for name, _ in model.named_parameters()
        if not name.startswith(tuple(f"{n}." for n in names))
    ]
    if elsewhere:
        return f"it has parameters elsewhere ({elsewhere[0]})"
    return "" if _hands_on(model) else "it modifies hidden states outside of its layers"


def _hands_on(model: nn.Module) -> bool:
    """Whether hidden states come out as they went in where all that stages hold is replaced."""
    hull = _hull(model)
    width = model.config.get_text_config().hidden_size  # type: ignore[operator,union-attr]
    hidden = torch.arange(3.0 * width).sin().reshape(1, 3, width)
    try:
        with torch.no_grad():
            output = hull(
                inputs_embeds=hidden, position_ids=torch.arange(3).unsqueeze(0), use_cache=False
            )
    except Exception as error:
        log.debug(
            "could not probe the model for pipeline stages: %s: %s", type(error).__name__, error
        )
        return False
    return torch.equal(last_layer_output(output), hidden)


def _hull(model: nn.Module) -> nn.Module:
    """A copy, on the CPU, of what no stage has for itself; the values of its buffers are of no account."""
    inner = _inner(model)
    layers = nn.ModuleList(PassThrough() for _ in inner.layers)
    parts = {id(getattr(inner, name)): PassThrough() for name in _ENDS} | {
        id(_any(model).lm_head): PassThrough()
    }
    hull: nn.Module = copy.deepcopy(model, {**parts, id(inner.layers): layers})
    for module in hull.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return hull
