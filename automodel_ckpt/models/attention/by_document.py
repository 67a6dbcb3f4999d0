"""Attention that is limited to each document of a row (packing), without the pairs of tokens of different documents.

transformers separates the documents of a row by a mask over all pairs of the row's tokens. For models that were enabled
with :func:`attend_by_document`, the borders of the documents take the place of the mask, and a kernel of
:mod:`~automodel_ckpt.models.attention.document_kernels` computes attention. The mask is still used for any other
pattern than causal attention within documents, and for options that need all pairs.

This is an attention implementation of transformers with its own name, which is set in the model's configurations.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from automodel_ckpt.models.attention.document_kernels import (
    Request,
    SdpaKernel,
    preferred_kernels,
)
from automodel_ckpt.models.attention.documents import Documents, PreparedRow, documents_of
from automodel_ckpt.models.attention.packing_probe import probe_rows
from automodel_ckpt.models.inspect.forward import attention_of, logits_of, side_effect_free

if TYPE_CHECKING:
    from automodel_ckpt.models.attention.flex_kernel import FlexKernel
    from automodel_ckpt.models.attention.length_kernels import VarlenKernel

log = logging.getLogger(__name__)

Kernel: TypeAlias = "SdpaKernel | FlexKernel | VarlenKernel"
"""A way to compute attention within documents. Kernels are compared by value."""
_BASES = ("sdpa", "eager")
"""The implementations that an enabled model can have had before, which compute everything else than documents."""
_PREFIX = "automodel_ckpt_documents"
"""Names are this, the base and the name of the kernel, joined by dots."""
_PROBE = ".probe"
_NEEDS_PAIRS = ("position_bias", "cache", "output_attentions")
"""Options of attention that require the mask, unless they are None or false."""
_COMPARES_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
_COMPARES_HARMLESSLY = ("gemma4", "gemma4_unified")
"""Models that compare the name only where ``logits_to_keep`` is above 1, to keep masks for the last tokens."""


class UnsupportedByKernel(Exception):
    """The kernel cannot compute what a layer asks for, or computes something else."""


def installed_kernels(device_type: str) -> dict[str, Kernel]:
    """The kernels for a type of device that are installed, by name, the preferred one first."""
    kernels: dict[str, Kernel] = {"sdpa": SdpaKernel()}
    if device_type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        from automodel_ckpt.models.attention.flex_kernel import FlexKernel
        from automodel_ckpt.models.attention.length_kernels import VarlenKernel

        kernels["flex"] = FlexKernel()
        kernels["varlen"] = VarlenKernel(varlen_attn)
    names = preferred_kernels(device_type, kernels, is_compiled=False)
    return {name: kernels[name] for name in names}


def attend_by_document(
    model: nn.Module,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
    *,
    kernel_name: str = "sdpa",
    kernel: Kernel | None = None,
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bool:
    """Enable attention per document for *model* if its outputs stay those of the mask. Returns whether it is enabled.

    Only for models with sdpa or eager attention. Runs *model* with *options*, in the context *compute*, on a few
    tokens, on *device* (default: that of its parameters), without side effects. *multiple* divides the number of
    tokens. *kernel_name* is one of the installed kernels, or names *kernel*.
    """
    device = device or next(model.parameters()).device
    kernel = kernel or installed_kernels(device.type).get(kernel_name)
    base = attention_of(model)
    if kernel is None or base not in _BASES or compares_name(model):
        return False
    tokens, restarted, continued = probe_rows(multiple, device)
    name = ".".join([_PREFIX, base, kernel_name])
    _register(name, kernel, base)
    try:
        with side_effect_free(model), compute():
            by_masks = _logits(model, tokens, restarted, options)
            crossed = _logits(model, tokens, continued, options)
            # A model that computes with the mask fails below or returns other logits, and keeps its
            # masks.
            _set_name(model, base, name + _PROBE)
            by_document = _logits(model, tokens, restarted, options)
            _set_name(model, name + _PROBE, name)
    except Exception as error:
        log.debug(
            "attention cannot be limited to each sample by %s: %s: %s",
            kernel.label,
            type(error).__name__,
            error,
        )
        # Undone on every failure: a model that stays enabled would get documents in place of its
        # mask.
        attend_by_mask(model)
        return False
    # The effect of crossing attention is the scale: rounding is far below it in every dtype.
    difference = (by_document - by_masks).abs().max()
    is_equal = bool(difference <= 0.1 * (crossed - by_masks).abs().max())
    if not is_equal:
        attend_by_mask(model)
    return is_equal


def attend_by_mask(model: nn.Module) -> None:
    """Undo :func:`attend_by_document`."""
    for config in _configs_of(model):
        name = config._attn_implementation or ""
        if name.startswith(_PREFIX):
            config._attn_implementation_internal = name.split(".")[1]


def compares_name(model: nn.Module) -> bool:
    """Whether the code of a part of *model* computes something else for another name than sdpa.

    Models with an index of the keys that each token sees (DeepSeek V3.2, GLM MoE DSA, MiniMax M3) add it to the mask
    only for the names sdpa and eager. The probe's few tokens cannot show this, because the index then has all keys.
    """
    modules = {type(part).__module__ for part in model.modules()}
    return any(_source_compares_name(module) for module in modules)


@functools.cache
def _source_compares_name(module: str) -> bool:
    if module.split(".")[-2:-1] and module.split(".")[-2] in _COMPARES_HARMLESSLY:
        return False
    if not module.rpartition(".")[2].startswith(("modeling_", "modular_")):
        return False
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        # Code without a source cannot be read: the mask is always right.
        return True
    return _COMPARES_NAME.search(source) is not None


def _logits(
    model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, options: Mapping[str, Any]
) -> torch.Tensor:
    output = model(input_ids=tokens, position_ids=positions, **options)
    return logits_of(output).float()


def _set_name(model: nn.Module, before: str, after: str) -> None:
    """Rename the attention implementation in the configurations of *model* that have the name *before*."""
    for config in _configs_of(model):
        if config._attn_implementation == before:
            # The property would also change inner configurations, such as that of a vision tower with eager attention.
            config._attn_implementation_internal = after


def _configs_of(model: nn.Module) -> list[Any]:
    """The configurations that the parts of *model* pass to transformers' mask functions."""
    configs = []
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.append(config)
    return configs


def _register(name: str, kernel: Kernel, base: str) -> None:
    """Register *kernel* with transformers under *name*, and for probes under another name, where it is validated."""
    if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        # Registered for another model, and context parallelism may have replaced the function since.
        return
    mask = functools.partial(_mask, kernel, base)
    for each, is_probe in ((name, False), (name + _PROBE, True)):
        AttentionMaskInterface.register(each, mask)
        attention = functools.partial(_attention, kernel, base, is_probe=is_probe)
        AttentionInterface.register(each, attention)


def _mask(kernel: Kernel, base: str, *args: Any, **options: Any) -> Any:
    """A mask function of transformers: what *kernel* needs of a row with documents, else the mask of *base*."""
    # documents_of needs all arguments by name, as transformers 5.17 to 5.24 pass them.
    documents = None if args else documents_of(**options)
    if documents is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **options)
    return kernel.prepare(documents)


def _attention(
    kernel: Kernel,
    base: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    is_probe: bool,
    **options: Any,
) -> Any:
    """An attention function of transformers: compute documents with *kernel*, everything else with *base*.

    *query*, *key*, *value*: [1, heads, T, D]. Returns (output [1, T, heads, D], None). With *is_probe*, it raises
    :class:`UnsupportedByKernel` where the kernel cannot compute documents; else they are computed with the mask.
    """
    if not isinstance(attention_mask, PreparedRow):
        return _base_attention(base, module)(module, query, key, value, attention_mask, **options)
    rows: Any = attention_mask
    kernel_query, kernel_key, kernel_value = _in_compute_dtype(query, key, value)
    request = _request(module, kernel_query, kernel_key, kernel_value, rows.window, options)
    if is_probe:
        _base_attention(base, module)
        _check_kernel(kernel, request, module, query.device)
    is_complete = len(query) == 1 and query.shape[2] == key.shape[2] == rows.num_tokens
    if not is_complete or kernel.unsupported(request):
        mask = rows.mask
        if base == "eager":
            # Eager attention adds the mask to the scores.
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
                ~mask, torch.finfo(query.dtype).min
            )
        return _base_attention(base, module)(module, query, key, value, mask, **options)
    dropout = options.get("dropout") or 0.0
    sinks = options.get("s_aux")
    output = kernel.attend(kernel_query, kernel_key, kernel_value, rows, request, sinks, dropout)
    return output, None


def _base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of the implementation *base* for the attention module *module*.

    Raises :class:`UnsupportedByKernel` if there is none.
    """
    if base != "eager":
        of_library: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[base]
        return of_library
    # Each model of transformers has its own function for eager attention, with this name.
    for part in type(module).__mro__:
        function = getattr(sys.modules.get(part.__module__), "eager_attention_forward", None)
        if function is not None:
            found: Callable[..., Any] = function
            return found
    raise UnsupportedByKernel(f"{type(module).__name__} has no separate eager attention")


def _in_compute_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """*tensors* in the dtype of autocast, which does not know the kernels; unchanged without autocast."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) for tensor in tensors]


def _request(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    options: Mapping[str, Any],
) -> Request:
    needing_pairs = []
    for name in _NEEDS_PAIRS:
        given = options.get(name)
        if given is not None and given is not False:
            needing_pairs.append(name)
    return Request(
        device_type=query.device.type,
        dtype=query.dtype,
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        num_heads=query.shape[1],
        num_key_heads=key.shape[1],
        scale=options.get("scaling"),
        window=window,
        softcap=options.get("softcap"),
        has_sinks=options.get("s_aux") is not None,
        has_dropout=bool(options.get("dropout")),
        needs_pairs=next(iter(needing_pairs), ""),
    )


def _check_kernel(
    kernel: Kernel, request: Request, module: nn.Module, device: torch.device
) -> None:
    """Validate that *kernel* computes *request*, in training too. Raises :class:`UnsupportedByKernel`."""
    reason = kernel.unsupported(request)
    if not reason and _drops(module):
        reason = kernel.unsupported(dataclasses.replace(request, has_dropout=True))
    if reason:
        raise UnsupportedByKernel(reason)
    # The kernels of a CPU are torch's attention, which the model's outputs validate.
    if device.type != "cpu":
        validate_kernel(kernel, request, device)


def _drops(module: nn.Module) -> bool:
    """Whether an attention module has dropout, which it passes on only in training."""
    settings = [given for name, given in vars(module).items() if "dropout" in name]
    return any(isinstance(given, float) and given > 0 for given in settings)


@functools.cache
def validate_kernel(kernel: Kernel, request: Request, device: torch.device) -> None:
    """Compare the output and the gradients of *kernel* with those of the mask for random documents of one row.

    Raises :class:`UnsupportedByKernel` if they differ by more than rounding, and what the kernel raises.
    """
    documents = Documents(((3, 1), (70, 1), (1, 2), (129, 1)), request.window, device)
    generator = torch.Generator(device).manual_seed(0)
    length = documents.num_tokens
    tensors = []
    for heads, size in (
        (request.num_heads, request.head_dim),
        (request.num_key_heads, request.head_dim),
        (request.num_key_heads, request.value_dim),
    ):
        shape = (1, heads, length, size)
        tensor = torch.randn(shape, generator=generator, device=device, dtype=request.dtype)
        tensors.append(tensor)
    upstream = torch.randn(
        (1, length, request.num_heads, request.value_dim), generator=generator, device=device
    )
    sinks = None
    if request.has_sinks:
        sinks = torch.randn(request.num_heads, generator=generator, device=device)
    # Each kernel has its own type of prepared rows.
    rows: Any = kernel.prepare(documents)
    # A probe runs without gradients and without compilation.
    with torch.enable_grad(), torch.compiler.set_stance("default"):
        attend = functools.partial(kernel.attend, rows=rows, request=request, sinks=sinks)
        found = _with_gradients(attend, tensors, upstream)
        by_pairs = functools.partial(
            attention_by_pairs, mask=documents.mask, request=request, sinks=sinks
        )
        expected = _with_gradients(by_pairs, [tensor.float() for tensor in tensors], upstream)
    for ours, theirs in zip(found, expected, strict=True):
        allowed = 0.03 * float(theirs.abs().max())
        # The comparison is false for NaN.
        if not float((ours.float() - theirs).abs().max()) <= allowed:
            raise UnsupportedByKernel(f"{kernel.label} computes something else than the mask")


def _with_gradients(
    attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor], upstream: torch.Tensor
) -> list[torch.Tensor]:
    """The output of *attend* for *tensors*, and the gradients of the tensors for that of the output."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = attend(*leaves)
    gradients = torch.autograd.grad(output, leaves, upstream.to(output.dtype))
    return [output.detach(), *gradients]


def attention_by_pairs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    request: Request,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition of attention with a mask of all pairs, without dropout: [1, T, heads, D]."""
    repeats = request.num_heads // request.num_key_heads
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    scale = request.head_dim**-0.5 if request.scale is None else request.scale
    scores = query @ key.transpose(2, 3) * scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        # A sink takes part in the softmax as a key without a value.
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    num_keys = key.shape[2]
    weights = scores.softmax(dim=3)[..., :num_keys]
    return (weights @ value).transpose(1, 2)
