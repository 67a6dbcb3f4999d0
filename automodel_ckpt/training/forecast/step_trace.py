"""The memory of a training step, found by running it on tensors without values.

The forward and the backward pass run under torch's FakeTensorMode, and the bytes of all tensors that exist at one time
are counted. So the count follows the model's own code: what autograd saves, the temporary tensors of a layer, and
activation checkpointing with its second forward pass.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from automodel_ckpt.models.inspect.interface import model_without_adapters
from automodel_ckpt.models.layers.activation_memory import checkpoint_activations
from automodel_ckpt.models.loss.mtp import MultiTokenPrediction, mtp_of
from automodel_ckpt.models.meta_init import constants_in, float32_names
from automodel_ckpt.training.forecast.rank_parts import MicroBatchShape, RankParts
from automodel_ckpt.training.model.sections import activation_mode

log = logging.getLogger("automodel_ckpt")

Tensors = Mapping[str, Tensor]
_NAME = "automodel_ckpt_trace"


@dataclass(frozen=True)
class HeadMemory:
    """The memory of the output layer and the loss, which a trace does not run.

    *peak_bytes* exist while the loss is computed, in addition to the gradient of the hidden states. *gradient_bytes* of
    them, the gradient of the layer's weight, remain. *waiting_bytes* are the bytes of a loss until its backward pass
    begins, if other micro-batches are computed before.
    """

    peak_bytes: int
    gradient_bytes: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True)
class StepTrace:
    """Bytes of tensors in a forward and a backward pass of a model without its output layer, besides parameters.

    *after_forward* exist between the two passes, with the gradient of the hidden states. *course* has (bytes of the
    gradients that were complete before, peak) of each part of the backward pass, in which one gradient is computed. A
    complete gradient is freed.
    """

    forward: int
    after_forward: int
    course: tuple[tuple[int, int], ...]

    def part(self, num_stages: int) -> StepTrace:
        """The trace of one of *num_stages* equal parts of the model's layers."""
        course = [(done // num_stages, peak // num_stages) for done, peak in self.course]
        return StepTrace(
            self.forward // num_stages, self.after_forward // num_stages, tuple(course)
        )


Traces = dict[tuple[Any, ...], StepTrace | None]
"""The traces of a model by what changes a trace. None for steps that cannot be traced."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations inside the context create, while they exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return output

    def exclude(self, tensor: Tensor) -> None:
        """Do not count the storage of *tensor*, also if an operation returns a view of it."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        nbytes = storage.nbytes()
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.current -= nbytes


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    *,
    is_on_gpu: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' signature that keeps no attention weights, as flash attention on any device.

    With a bias of each pair of positions (T5), the weights are kept, unless a GPU has memory-efficient attention for
    it, which needs rows without gaps (models/attention/positions.py).
    """
    if position_bias is not None:
        # The sum with the mask is as large as the weights of all rows.
        bias = position_bias + query.new_zeros(len(query), 1, 1, 1)
        if is_on_gpu and position_bias.stride(-1) == 1:
            output, *_others = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, dropout, scale=scaling
            )
        else:
            output = F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    if value.shape[-1] == query.shape[-1]:
        output, _weights = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scaling
        )
    else:
        # Latent attention (DeepSeek): flash attention would return values of the queries' size.
        output, *_others = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, True, scale=scaling
        )
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def _traced_attention(model: nn.Module, is_on_gpu: bool) -> Iterator[None]:
    """Let the layers of *model* call :func:`_attention`, except where attention is computed by plain products.

    Without values, transformers builds a dense mask, and torch then selects the formula that keeps all weights.
    """
    ALL_ATTENTION_FUNCTIONS.register(_NAME, partial(_attention, is_on_gpu=is_on_gpu))
    # It needs no mask: samples of a row have lengths, or the row has one sample.
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *_, **__: None)
    before: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str) and name != "eager":
            before.setdefault(id(config), (config, name))
    for config, _name in before.values():
        config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        for config, name in before.values():
            config._attn_implementation_internal = name


def _traced_step(
    rank: RankParts,
    backbone: nn.Module,
    tokens: Tensors,
    shapes: Mapping[int, torch.Size],
    dtypes: Mapping[int, torch.dtype],
    *,
    keeps_attention: bool,
) -> StepTrace:
    """Count the bytes of a forward and a backward pass of *backbone*, the model without its output layer.

    Args:
        rank: The rank, which computes in its ``dtype``.
        backbone: Its parameters may be on the meta device. It is not changed.
        tokens: The arguments of its forward pass. Only shapes and dtypes are used.
        shapes: The shapes of the parameters, by id, that the rank has a part of.
        dtypes: The dtypes of the parameters that are not cast, and of the buffers that are cast, by id.
        keeps_attention: Whether layers call the attention that they are configured for, with a mask as large as all
            pairs of positions, instead of one like flash attention. Some models have code for "sdpa" only.

    Raises an exception of torch or of the model for a forward pass that needs values.
    """
    # It prints the stack of an operation that it does not support; the caller handles the exception.
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, torch_log.disabled = torch_log.disabled, True
    # On the meta device, transformers would look for packed samples in the values of the positions.
    attention = nullcontext() if keeps_attention else _traced_attention(backbone, rank.on_gpu)
    try:
        with attention, FakeTensorMode(allow_non_fake_inputs=True):
            own = _fake_parameters(backbone, _cast_to(rank), shapes, dtypes)
            fakes = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype)
                for name, tensor in tokens.items()
            }
            live = LiveBytes()
            for tensor in (*own.values(), *fakes.values()):
                live.exclude(tensor)
            # Not functional_call: activation checkpointing calls layers again in the backward pass.
            with live, _reparametrize_module(backbone, own, tie_weights=True):
                with _autocast(rank):
                    output = backbone(**fakes, **rank.recipe.trainable.forward_options)
                forward = live.peak
                # Of a model without its output layer: one tensor, or a list of several.
                if not isinstance(output, list):
                    output = [output if isinstance(output, Tensor) else output[0]]
                after_forward, course = _backward(live, own, output)
    finally:
        torch_log.disabled = was_disabled
    return StepTrace(forward, after_forward, course)


def _is_autocast(rank: RankParts) -> bool:
    """Whether parameters keep their dtype, and operations cast them."""
    return rank.dtype is not None and not rank.is_sharded


def _cast_to(rank: RankParts) -> torch.dtype | None:
    """The dtype that parameters are cast to. Returns None when they keep theirs."""
    return None if _is_autocast(rank) else rank.dtype


def _autocast(rank: RankParts) -> AbstractContextManager[Any]:
    dtype = rank.dtype or torch.bfloat16
    return torch.autocast("cpu", dtype=dtype, enabled=_is_autocast(rank))


def _backward(
    live: LiveBytes, own: Tensors, hidden: Sequence[Tensor]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Run the backward pass from *hidden*, and free the gradient of each of the parameters *own* when it is complete.

    Returns the bytes before it, and the course of the pass.
    """
    course: list[tuple[int, int]] = []
    num_bytes = 0

    def take(parameter: Tensor) -> None:
        nonlocal num_bytes
        course.append((num_bytes, live.peak))
        live.peak = live.current
        assert parameter.grad is not None
        num_bytes += parameter.grad.numel() * parameter.grad.element_size()
        parameter.grad = None

    for tensor in own.values():
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    initial = [torch.empty_like(each) for each in hidden]
    after_forward = live.current
    live.peak = live.current
    if hidden[0].requires_grad:
        torch.autograd.backward(list(hidden), initial)
    return after_forward, (*course, (num_bytes, live.peak))


def _fake_parameters(
    model: nn.Module,
    dtype: torch.dtype | None,
    shapes: Mapping[int, torch.Size],
    dtypes: Mapping[int, torch.dtype],
) -> dict[str, Tensor]:
    """Tensors in place of the parameters and buffers of *model*, parameters in *dtype*.

    *shapes* and *dtypes* describe single parameters and buffers, by id.
    """
    own: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        kind = parameter.dtype
        if kind.is_floating_point:
            kind = dtypes.get(id(parameter), dtype or kind)
        shape = shapes.get(id(parameter), parameter.shape)
        own[name] = torch.empty(shape, dtype=kind, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        own[name] = torch.empty(buffer.shape, dtype=dtypes.get(id(buffer), buffer.dtype))
    return own


@contextmanager
def checkpointing(model: nn.Module, enabled: bool) -> Iterator[None]:
    """With *enabled*, let the layers of *model* recompute their activations inside the context."""
    if not enabled:
        yield
        return
    checkpoint_activations(model)
    try:
        yield
    finally:
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False  # type: ignore[assignment]


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
    dtypes = _computed_dtypes(recipe.model, _cast_to(rank))
    # The output of an embedding is complete on each rank.
    lookups = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    complete = {id(module.weight) for module in lookups}
    parts = {key: shape for key, shape in rank.shapes.items() if key not in complete}
    # The code of some models states the number of heads, which a rank has fewer of.
    shapes: list[Mapping[int, torch.Size]] = [parts, {}] if rank.shapes else [{}]
    for keeps_attention, of_rank in [(keeps, each) for each in shapes for keeps in (False, True)]:
        try:
            with _without_output_layer(backbone):
                return _traced_step(
                    rank, backbone, tokens, of_rank, dtypes, keeps_attention=keeps_attention
                )
        except Exception as error:
            log.debug("the activations cannot be traced: %r", error)
    return None


def image_bytes(rank: RankParts, images: Mapping[str, Tensor]) -> int | None:
    """Bytes that remain after a multimodal model has computed the features of *images*. Returns None when unknown.

    *images* are arguments of ``get_image_features``. Only their shapes and dtypes are used.
    """
    inner = model_without_adapters(rank.recipe.model)
    cast_to, live = _cast_to(rank), LiveBytes()
    try:
        features = _ImageFeatures(getattr(inner, "base_model", inner))
        with FakeTensorMode():
            own = _fake_parameters(features, cast_to, {}, {})
            inputs: dict[str, Tensor] = {}
            for name, tensor in images.items():
                kind = (cast_to if tensor.is_floating_point() else None) or tensor.dtype
                inputs[name] = torch.empty(tensor.shape, dtype=kind)
            for tensor in own.values():
                live.exclude(tensor)
            with live, _autocast(rank):
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
