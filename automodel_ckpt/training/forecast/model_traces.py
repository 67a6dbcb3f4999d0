"""The traces of a recipe's model, for micro-batches of several sizes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from automodel_ckpt.models.inspect.float32_parts import constants_in, float32_names
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.loss.mtp import MultiTokenPrediction, mtp_of
from automodel_ckpt.parallel.precision import compute_dtype
from automodel_ckpt.training.forecast.micro_batch import MicroBatchShape
from automodel_ckpt.training.forecast.rank_parts import (
    quantized_itemsizes,
    quantized_layers,
    rank_parts,
)
from automodel_ckpt.training.forecast.step_trace import StepTrace, traced_step
from automodel_ckpt.training.model.sections import activation_mode, is_fully_sharded

log = logging.getLogger("automodel_ckpt")

_NUM_TRACED = 2
_traces: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], StepTrace | None]] = (
    weakref.WeakKeyDictionary()
)
"""The traces of a model by (rows, tokens per row, what else changes a trace); None: it cannot be traced."""


def trace_of(recipe: Any, batch: MicroBatchShape) -> StepTrace | None:
    """The trace of a step with the rows of *batch*, without images; None for a model whose forward pass needs values.

    Two numbers of rows are traced for a length, and others computed from these.
    """
    rows, lengths = batch.rows, (batch.tokens_per_row, batch.targets_per_row)
    known = _traces.setdefault(recipe.model, {})
    is_sharded = is_fully_sharded(recipe.config, recipe.layout)
    tp = recipe.layout.sizes.tp
    kind = (lengths, activation_mode(recipe.config.model), is_sharded, tp)
    if (rows, *kind) in known:
        return known[rows, *kind]
    others = {key[0]: trace for key, trace in known.items() if key[1:] == kind}
    if len(others) < _NUM_TRACED:
        known[rows, *kind] = found = _traced(recipe, batch)
        return found
    first, second = others
    start, end = others[first], others[second]
    if start is None or end is None:
        return None
    return start.between(end, (rows - first) / (second - first))


def forget_traces(recipe: Any) -> None:
    """Let the next number of rows be traced, instead of being computed from others, which is some percent off."""
    _traces.pop(recipe.model, None)


def _traced(recipe: Any, batch: MicroBatchShape) -> StepTrace | None:
    backbone = _traced_part(recipe.model)
    tokens = {"input_ids": torch.zeros(batch.rows, batch.tokens_per_row, dtype=torch.long)}
    if batch.targets_per_row is not None:
        targets = torch.zeros(batch.rows, batch.targets_per_row, dtype=torch.long)
        tokens["decoder_input_ids"] = targets
    dtype, is_autocast = traced_dtype(recipe)
    dtypes = {} if is_autocast else _computed_dtypes(recipe.model, dtype)
    quantized = quantized_layers(recipe)
    for key, itemsize in quantized_itemsizes(recipe).items():
        dtypes[key] = torch.float32 if itemsize == 4 else torch.bfloat16
    parts = rank_parts(recipe).shapes
    ways = [(False, parts), (True, parts)]
    if parts:
        # The code of some models states the number of heads.
        ways += [(False, {}), (True, {})]
    for keeps_attention, shapes in ways:
        try:
            with _without_output_layer(backbone), _quantized(backbone, quantized, is_autocast):
                return traced_step(
                    backbone,
                    tokens,
                    recipe.trainable.forward_options,
                    dtype=dtype,
                    is_autocast=is_autocast,
                    keeps_attention=keeps_attention,
                    is_on_gpu=recipe.layout.device.type == "cuda",
                    shapes=_without_lookups(backbone, shapes),
                    dtypes=dtypes,
                )
        except Exception as error:
            log.debug("the activations cannot be traced: %r", error)
    return None


def traced_dtype(recipe: Any) -> tuple[torch.dtype | None, bool]:
    """The dtype that a step computes in, None for that of the parameters, and whether it is that of autocast."""
    dtype = compute_dtype(recipe.config.distributed)
    return dtype, dtype is not None and not is_fully_sharded(recipe.config, recipe.layout)


def _computed_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """The dtypes of the parameters that fsdp2 does not cast to *dtype*, and of the buffers that it casts, by id."""
    if dtype is None:
        return {}
    kept, cast = float32_names(model, dtype), constants_in(model, dtype)
    found: dict[int, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        if name in kept:
            found[id(parameter)] = parameter.dtype
    for name, buffer in model.named_buffers():
        if name in cast:
            found[id(buffer)] = dtype
    return found


def _without_lookups(
    backbone: nn.Module, shapes: Mapping[int, torch.Size]
) -> dict[int, torch.Size]:
    """*shapes* without those of embeddings, whose output is complete on each rank."""
    lookups = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    complete = {id(module.weight) for module in lookups}
    return {key: shape for key, shape in shapes.items() if key not in complete}


def _traced_part(model: Any) -> nn.Module:
    """The part of a model whose activations are traced: without the output layer, with the layers of further tokens."""
    model = model_without_adapters(model)
    backbone: nn.Module = getattr(model, "base_model", model)
    layers = mtp_of(model)
    if layers is None or layers in set(backbone.modules()):
        return backbone
    return _WithDepths(backbone, layers)


@contextmanager
def _without_output_layer(backbone: Any) -> Iterator[None]:
    """Let *backbone* return its last hidden states if it has an output layer: T5 has no backbone without it."""
    head = getattr(backbone, "get_output_embeddings", lambda: None)()
    if head is None:
        yield
        return
    vars(head)["forward"] = lambda hidden: hidden
    try:
        yield
    finally:
        del vars(head)["forward"]


@contextmanager
def _quantized(
    backbone: nn.Module, layers: Sequence[nn.Linear], is_autocast: bool
) -> Iterator[None]:
    """Let *layers* of *backbone* compute as those of bitsandbytes, and their adapters as peft's for these.

    Results have the type of the inputs. Under autocast, adapters do not cast their inputs.
    """
    quantized = set(layers)
    adapted: list[Any] = []
    for module in backbone.modules():
        if is_autocast and getattr(module, "base_layer", None) in quantized:
            adapted.append(module)
    settings = [layer.cast_input_dtype_enabled for layer in adapted]
    for layer in layers:
        forward = layer.forward
        vars(layer)["forward"] = lambda x, forward=forward: forward(x).to(x.dtype)
    for layer in adapted:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]
        for layer, setting in zip(adapted, settings, strict=True):
            layer.cast_input_dtype_enabled = setting


class _WithDepths(nn.Module):
    """A model without its output layer, and its layers that predict further tokens."""

    def __init__(self, backbone: nn.Module, layers: MultiTokenPrediction) -> None:
        super().__init__()
        self.backbone, self.layers = backbone, layers

    def forward(self, input_ids: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        backbone: Any = self.backbone
        hidden = backbone(input_ids=input_ids, **options).last_hidden_state
        embeddings = backbone.get_input_embeddings()(input_ids)
        found: list[torch.Tensor] = self.layers(hidden, embeddings, {})
        return found
