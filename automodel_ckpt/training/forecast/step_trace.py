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

from automodel_ckpt.models.layers.activation_memory import checkpoint_activations

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


def traced_step(
    backbone: nn.Module,
    inputs: Tensors,
    options: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    is_autocast: bool = False,
    keeps_attention: bool = False,
    shapes: Mapping[int, torch.Size] | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
    is_on_gpu: bool = False,
) -> StepTrace:
    """Count the bytes of a forward and a backward pass of *backbone*.

    Args:
        backbone: The model without its output layer. Its parameters may be on the meta device. It is not changed.
        inputs: The arguments of its forward pass. Only shapes and dtypes are used.
        options: Further arguments of its forward pass.
        dtype: The dtype that the passes compute in, by default the dtype of the parameters.
        is_autocast: Whether autocast uses *dtype*; otherwise parameters are cast to it before.
        keeps_attention: Whether layers call the attention that they are configured for, with a mask as large as all
            pairs of positions, instead of one like flash attention. Some models have code for "sdpa" only.
        shapes: The shapes of the parameters, by id, that a rank has a part of.
        is_on_gpu: Whether the step is one of a GPU.
        dtypes: The dtypes of the parameters that are not cast, and of the buffers that are cast, by id.

    Raises an exception of torch or of the model for a forward pass that needs values.
    """
    # It prints the stack of an operation that it does not support; the caller handles the exception.
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, torch_log.disabled = torch_log.disabled, True
    # On the meta device, transformers would look for packed samples in the values of the positions.
    attention = nullcontext() if keeps_attention else _traced_attention(backbone, is_on_gpu)
    cast_to = None if is_autocast else dtype
    try:
        with attention, FakeTensorMode(allow_non_fake_inputs=True):
            own = fake_parameters(backbone, cast_to, shapes or {}, dtypes or {})
            fakes = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype)
                for name, tensor in inputs.items()
            }
            live = LiveBytes()
            for tensor in (*own.values(), *fakes.values()):
                live.exclude(tensor)
            # Not functional_call: activation checkpointing calls layers again in the backward pass.
            with live, _reparametrize_module(backbone, own, tie_weights=True):
                with autocast_to(dtype, is_autocast):
                    output = backbone(**fakes, **options)
                forward = live.peak
                # Of a model without its output layer: one tensor, or a list of several.
                if not isinstance(output, list):
                    output = [output if isinstance(output, Tensor) else output[0]]
                after_forward, course = _backward(live, own, output)
    finally:
        torch_log.disabled = was_disabled
    return StepTrace(forward, after_forward, course)


def autocast_to(dtype: torch.dtype | None, enabled: bool) -> AbstractContextManager[Any]:
    """Autocast to *dtype* as a step uses it."""
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=enabled)


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


def fake_parameters(
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
