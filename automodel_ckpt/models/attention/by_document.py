"""Attention that is limited to each document of a row (packing), without the pairs of tokens of different documents.

transformers separates the documents of a row by a mask over all pairs of the row's tokens. For models that were enabled
with :func:`attend_by_document`, the borders of the documents take the place of the mask, and a kernel of
:mod:`~automodel_ckpt.models.attention.documents` computes attention. The mask is still used for any other
pattern than causal attention within documents, and for options that need all pairs.

This is an attention implementation of transformers with its own name, which is set in the model's configurations.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from automodel_ckpt.models.attention.documents import (
    Documents,
    Kernel,
    document_kernel,
    documents_of,
)
from automodel_ckpt.models.attention.packing_probe import probe_rows
from automodel_ckpt.models.inspect.forward import (
    attention_of,
    autocast_dtype,
    logits_of,
    side_effect_free,
)

log = logging.getLogger(__name__)

_BASES = ("sdpa", "eager")
"""The implementations that an enabled model can have had before, which compute everything else than documents."""
_PREFIX = "automodel_ckpt_documents"
"""Names are this, the base and the label of the kernel, joined by dots."""
_PROBE = ".probe"
_COMPARES_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
_COMPARES_HARMLESSLY = ("gemma4", "gemma4_unified")
"""Models that compare the name only where ``logits_to_keep`` is above 1, to keep masks for the last tokens."""


class UnsupportedByKernel(Exception):
    """The kernel cannot compute what a layer asks for."""


def attend_by_document(
    model: nn.Module,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
    *,
    kernel: Kernel | None = None,
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bool:
    """Enable attention per document for *model* if its outputs stay the same as with the mask. Returns whether it is
    enabled.

    Only for models with sdpa or eager attention. Runs *model* with *options*, in the context *compute*, on a few
    tokens, on *device* (default: the device of its parameters), without side effects. *multiple* divides the number of
    tokens. The default *kernel* is the device's.
    """
    device = device or next(model.parameters()).device
    kernel = kernel or document_kernel(device.type)
    base = attention_of(model)
    if kernel is None or base not in _BASES:
        return False
    if any(map(_source_compares_name, {type(part).__module__ for part in model.modules()})):
        return False
    tokens, restarted, continued = probe_rows(multiple, device)
    name = ".".join([_PREFIX, base, kernel.label])
    _register(name, kernel, base)
    try:
        with side_effect_free(model), compute():
            by_masks = _logits(model, tokens, restarted, options)
            crossed = _logits(model, tokens, continued, options)
            # A model that computes with the mask fails below or returns other logits, and keeps its masks.
            _set_name(model, base, name + _PROBE)
            by_document = _logits(model, tokens, restarted, options)
            _set_name(model, name + _PROBE, name)
        # The effect of crossing attention is the scale: rounding is far below it in every dtype.
        difference = (by_document - by_masks).abs().max()
        is_equal = bool(difference <= 0.1 * (crossed - by_masks).abs().max())
    except Exception as error:
        log.debug("no attention by %s: %s: %s", kernel.label, type(error).__name__, error)
        is_equal = False
    if not is_equal:
        # On every failure: a model that stays enabled would get documents in place of its mask.
        attend_by_mask(model)
    return is_equal


def attend_by_mask(model: nn.Module) -> None:
    """Undo :func:`attend_by_document`."""
    for config in _configs_of(model):
        name = config._attn_implementation or ""
        if name.startswith(_PREFIX):
            config._attn_implementation_internal = name.split(".")[1]


@functools.cache
def _source_compares_name(module: str) -> bool:
    """Whether the code of a model in a Python *module* computes something else for another name than sdpa.

    Models with an index of the keys that each token sees (DeepSeek V3.2, GLM MoE DSA, MiniMax M3) add it to the mask
    only for the names sdpa and eager. The probe's few tokens cannot show this, because the index then has all keys.
    """
    package, _, name = module.rpartition(".")
    is_harmless = package.rpartition(".")[2] in _COMPARES_HARMLESSLY
    if is_harmless or not name.startswith(("modeling_", "modular_")):
        return False
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        # Code without a source cannot be read: the mask is always right.
        return True
    return _COMPARES_NAME.search(source) is not None


def _logits(
    model: nn.Module, tokens: Tensor, positions: Tensor, options: Mapping[str, Any]
) -> Tensor:
    output = model(input_ids=tokens, position_ids=positions, **options)
    return logits_of(output).float()


def _set_name(model: nn.Module, before: str, after: str) -> None:
    """Rename the attention implementation in the configurations of *model* that have the name *before*."""
    for config in _configs_of(model):
        if config._attn_implementation == before:
            # The property would also change inner configurations, such as a vision tower's with eager attention.
            config._attn_implementation_internal = after


def _configs_of(model: nn.Module) -> list[Any]:
    """The configurations that the parts of *model* pass to transformers' mask functions."""
    configs = [getattr(part, "config", None) for part in model.modules()]
    return [config for config in configs if isinstance(config, PreTrainedConfig)]


def _register(name: str, kernel: Kernel, base: str) -> None:
    """Register *kernel* with transformers under *name*, and for probes under another name."""
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    is_probe: bool,
    **options: Any,
) -> Any:
    """An attention function of transformers: compute documents with *kernel*, everything else with *base*.

    *query*, *key*, *value*: [1, heads, T, D]. Returns (output [1, T, heads, D], None). With *is_probe*, it raises
    :class:`UnsupportedByKernel` where the kernel cannot compute documents; else they are computed with the mask.
    """
    if not isinstance(attention_mask, Documents):
        return _base_attention(base, module)(module, query, key, value, attention_mask, **options)
    rows = attention_mask
    heads = (query, key, value)
    # Autocast does not know the kernels.
    if dtype := autocast_dtype(query.device):
        heads = (query.to(dtype), key.to(dtype), value.to(dtype))
    reason = kernel.unsupported(heads[0], heads[2], options)
    if is_probe:
        _base_attention(base, module)
        if not reason and _drops(module):
            reason = kernel.unsupported(heads[0], heads[2], {**options, "dropout": 0.5})
        if reason:
            raise UnsupportedByKernel(reason)
    is_complete = len(query) == 1 and query.shape[2] == key.shape[2] == rows.num_tokens
    if is_complete and not reason:
        return kernel.attend(*heads, rows, options), None
    mask = rows.mask
    if base == "eager":
        # Eager attention adds the mask to the scores.
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    return _base_attention(base, module)(module, query, key, value, mask, **options)


def _base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of the implementation *base* for the attention module *module*.

    Raises :class:`UnsupportedByKernel` if there is none.
    """
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]  # type: ignore[no-any-return]
    # Each model of transformers has its own function for eager attention, with this name.
    for part in type(module).__mro__:
        function = getattr(sys.modules.get(part.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise UnsupportedByKernel(f"{type(module).__name__} has no separate eager attention")


def _drops(module: nn.Module) -> bool:
    """Whether an attention module has dropout, which it passes on only in training."""
    settings = [given for name, given in vars(module).items() if "dropout" in name]
    return any(isinstance(given, float) and given > 0 for given in settings)
