"""The traces of a recipe's model, for micro-batches of several sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from automodel_ckpt.models.inspect.interface import model_without_adapters
from automodel_ckpt.models.loss.mtp import MultiTokenPrediction, mtp_of
from automodel_ckpt.models.meta_init import constants_in, float32_names
from automodel_ckpt.training.forecast.rank_parts import MicroBatchShape, RankParts, quantized_layers
from automodel_ckpt.training.forecast.step_trace import (
    LiveBytes,
    StepTrace,
    autocast_to,
    fake_parameters,
    traced_step,
)
from automodel_ckpt.training.model.sections import activation_mode

log = logging.getLogger("automodel_ckpt")

Traces = dict[tuple[Any, ...], StepTrace | None]
"""The traces of a model by what changes a trace. None for steps that cannot be traced."""


def trace_of(rank: RankParts, batch: MicroBatchShape, traces: Traces) -> StepTrace | None:
    """The trace of a step with the rows of *batch*, without images. Returns None when the forward pass needs values."""
    sizes = (batch.rows, batch.tokens_per_row, batch.targets_per_row)
    key = (*sizes, activation_mode(rank.recipe.config.model), rank.is_sharded, rank.sizes.tp)
    if key not in traces:
        traces[key] = _traced(rank, batch)
    return traces[key]


def _traced(rank: RankParts, batch: MicroBatchShape) -> StepTrace | None:
    recipe = rank.recipe
    backbone = _traced_part(recipe.model)
    tokens = {"input_ids": torch.zeros(batch.rows, batch.tokens_per_row, dtype=torch.long)}
    if batch.targets_per_row is not None:
        targets = torch.zeros(batch.rows, batch.targets_per_row, dtype=torch.long)
        tokens["decoder_input_ids"] = targets
    is_autocast = _is_autocast(rank)
    dtypes = {} if is_autocast else _computed_dtypes(recipe.model, rank.dtype)
    # Layers in 4 bits compute as others do.
    peft = recipe.config.peft
    in_8_bits = peft is not None and peft.quantize_base == "int8"
    for key, itemsize in rank.itemsizes.items() if in_8_bits else ():
        dtypes[key] = torch.float32 if itemsize == 4 else torch.bfloat16
    # The output of an embedding is complete on each rank.
    lookups = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    complete = {id(module.weight) for module in lookups}
    parts = {key: shape for key, shape in rank.shapes.items() if key not in complete}
    # The code of some models states the number of heads, which a rank has fewer of.
    shapes: list[Mapping[int, torch.Size]] = [parts, {}] if rank.shapes else [{}]
    quantized = quantized_layers(recipe) if in_8_bits else []
    for keeps_attention, of_rank in [(keeps, each) for each in shapes for keeps in (False, True)]:
        try:
            with _without_output_layer(backbone), _quantized(backbone, quantized, is_autocast):
                return traced_step(
                    backbone,
                    tokens,
                    recipe.trainable.forward_options,
                    dtype=rank.dtype,
                    is_autocast=is_autocast,
                    keeps_attention=keeps_attention,
                    shapes=of_rank,
                    dtypes=dtypes,
                    is_on_gpu=rank.on_gpu,
                )
        except Exception as error:
            log.debug("the activations cannot be traced: %r", error)
    return None


def _is_autocast(rank: RankParts) -> bool:
    """Whether parameters keep their dtype, and operations cast them."""
    return rank.dtype is not None and not rank.is_sharded


def image_bytes(rank: RankParts, images: Mapping[str, Tensor]) -> int | None:
    """Bytes that remain after a multimodal model has computed the features of *images*. Returns None when unknown.

    *images* are arguments of ``get_image_features``. Only their shapes and dtypes are used.
    """
    inner = model_without_adapters(rank.recipe.model)
    is_autocast = _is_autocast(rank)
    cast_to = None if is_autocast else rank.dtype
    live = LiveBytes()
    try:
        features = _ImageFeatures(getattr(inner, "base_model", inner))
        with FakeTensorMode():
            own = fake_parameters(features, cast_to, {}, {})
            inputs: dict[str, Tensor] = {}
            for name, tensor in images.items():
                kind = (cast_to if tensor.is_floating_point() else None) or tensor.dtype
                inputs[name] = torch.empty(tensor.shape, dtype=kind)
            for tensor in own.values():
                live.exclude(tensor)
            with live, autocast_to(rank.dtype, is_autocast):
                output = torch.func.functional_call(features, own, kwargs=inputs)
            found = live.current
            del output
        return found
    except Exception as error:
        log.debug("the features of images cannot be traced: %r", error)
        return None


class _ImageFeatures(nn.Module):
    """The part of a multimodal model that computes the features of images for its text layers."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, **images: Tensor) -> Any:
        return self.backbone.get_image_features(**images)  # type: ignore[operator]


def _computed_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """The dtypes of the parameters that fsdp2 does not cast to *dtype*, and of the buffers that it casts, by id."""
    if dtype is None:
        return {}
    kept, cast = float32_names(model, dtype), constants_in(model, dtype)
    found = {id(each): each.dtype for name, each in model.named_parameters() if name in kept}
    return found | {id(each): dtype for name, each in model.named_buffers() if name in cast}


def _traced_part(model: Any) -> nn.Module:
    """The part of a model that is traced: without the output layer, with the layers of further tokens."""
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
    """Let *layers* of *backbone* compute as bitsandbytes layers do, and their adapters as peft's adapters for these.

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

    def forward(self, input_ids: Tensor, **options: Any) -> list[Tensor]:
        backbone: Any = self.backbone
        hidden = backbone(input_ids=input_ids, **options).last_hidden_state
        embeddings = backbone.get_input_embeddings()(input_ids)
        found: list[Tensor] = self.layers(hidden, embeddings, {})
        return found
