"""The parts of a model that stay in float32 while the others are computed in 16 bits."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from automodel_ckpt.models.meta_init import is_transient, on_meta

log = logging.getLogger("automodel_ckpt")

_OF_ADAPTERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""What peft inserts into the names of the parameters that it wraps."""
_COMPUTES_IN_ONE_TYPE = ("deberta", "xlnet")
"""Models that create parameters in float32 and cannot compute with them in 16 bits."""
_FACTORS_IN_FILES = re.compile(r"\.(slope_rate|\w+_decay|attn\.bias)$")
"""Buffers in files by which models multiply activations: decays of MiniMax, masks of GPT. Others stay in float32, such
as the biases of routers, which would select other experts."""


def float32_pattern(model: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """What the names of the parameters and buffers contain that *model* keeps in float32 in a model of type *dtype*.

    ``from_pretrained`` searches names in the same way: the entries of ``_keep_in_fp32_modules_strict``, with float16
    also those of ``_keep_in_fp32_modules``, are regular expressions in which ``*`` is any text. None: no name does.
    """
    any_model: Any = model
    entries: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        entries.update(getattr(any_model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        entries.update(getattr(any_model, "_keep_in_fp32_modules", None) or ())
    if not entries:
        return None
    return re.compile("|".join(f"(?:{entry.replace('*', '.*')})" for entry in sorted(entries)))


def float32_kept(model: nn.Module) -> dict[str, frozenset[str]]:
    """The names of the parameters and buffers that *model* keeps in float32, by the dtype code of the others.

    Names of layers that are in other stages of a pipeline are among them.
    """
    created: frozenset[str] = frozenset()
    names = _names_in(model)
    if isinstance(model, PreTrainedModel):
        built = _built_in(model, torch.bfloat16)
        if built is not None:
            # A constructor does not distinguish the types of 16 bits.
            created = _float32_in(built, buffers=True)
            names |= _names_in(built)
    found: dict[str, frozenset[str]] = {}
    for code, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        pattern = float32_pattern(model, dtype)
        kept = set(created)
        if pattern is not None:
            kept.update(name for name in names if pattern.search(name))
        if kept:
            found[code] = frozenset(kept)
    return found


def _names_in(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    return names


def float32_names(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """The names of the parameters that *model*, which may have adapters, keeps in float32 if it computes in *dtype*.

    Those that the class of the model creates in float32 in a model of type *dtype* are among them, if it can compute
    with them, and batch normalization with running statistics in float32: torch requires weights of the same type.
    """
    found: set[str] = set()
    pattern = float32_pattern(model, dtype)
    created, outer = _created_in_float32(model, dtype, pattern)
    for name, _ in model.named_parameters(remove_duplicate=False):
        plain = _OF_ADAPTERS.sub("", name)
        if plain.removeprefix(outer) in created or (pattern is not None and pattern.search(plain)):
            found.add(name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        mean = getattr(module, "running_mean", None)
        if isinstance(module, _BatchNorm) and mean is not None and mean.dtype == torch.float32:
            found.update(name for name, _ in module.named_parameters(prefix))
    return frozenset(found)


def _created_in_float32(
    model: nn.Module, dtype: torch.dtype | None, pattern: re.Pattern[str] | None
) -> tuple[frozenset[str], str]:
    """The parameters that the model of transformers in *model* creates in float32 if it is built in *dtype*, and the
    prefix of their names.

    Without those that *pattern* finds. Empty if it cannot compute with them.
    """
    prefix, inner = _of_transformers(model)
    if inner is None or dtype not in (torch.bfloat16, torch.float16):
        return frozenset(), prefix
    built = _built_in(inner, dtype)
    if built is None or inner.config.model_type in _COMPUTES_IN_ONE_TYPE:
        return frozenset(), prefix
    names = {name for name in _float32_in(built) if pattern is None or not pattern.search(name)}
    return frozenset(names), prefix


def _float32_in(model: nn.Module, *, buffers: bool = False) -> frozenset[str]:
    """The names of the parameters of *model* in float32; with *buffers*, also of those buffers that files contain."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if buffers:
        tensors = model.state_dict(keep_vars=True)
    return frozenset(name for name, tensor in tensors.items() if tensor.dtype == torch.float32)


def _of_transformers(model: nn.Module) -> tuple[str, PreTrainedModel | None]:
    """The outermost model of transformers in *model*, and the prefix of the names of its parameters."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return f"{name}." if name else "", module
    return "", None


def constants_in(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """The names of the buffers of *model* that it would create in *dtype* if it were built in this type.

    Those are constants that no file contains, such as tables of positions. Activations that are computed with one in
    float32 would be in float32, which layers with weights in *dtype* cannot use. Of buffers in files, only factors of
    activations are among them. Empty for a model that is not of transformers.
    """
    prefix, inner = _of_transformers(model)
    if inner is None or dtype is None:
        return frozenset()
    buffers = _float_buffers(inner)
    if all(each.dtype == dtype for each in buffers.values()):
        return frozenset()
    built = _built_in(inner, dtype)
    if built is None:
        return frozenset()
    tables: set[str] = set()
    created = _float_buffers(built)
    kept = _norm_buffers(built) | _kept_by_list(built, dtype)
    for name, buffer in buffers.items():
        plain = _OF_ADAPTERS.sub("", name)
        if plain not in created or not created[plain].dtype == dtype != buffer.dtype:
            continue
        is_factor = plain not in kept and _FACTORS_IN_FILES.search(plain)
        if is_factor or not _is_in_files(built, plain):
            tables.add(prefix + name)
    return frozenset(tables)


def _float_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_buffers() if each.is_floating_point()}


def _norm_buffers(model: nn.Module) -> set[str]:
    """The buffers of batch normalization, which stay in float32."""
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            found.update(name for name, _ in module.named_buffers(prefix))
    return found


def _kept_by_list(model: nn.Module, dtype: torch.dtype) -> set[str]:
    pattern = float32_pattern(model, dtype)
    if pattern is None:
        return set()
    return {name for name, _ in model.named_buffers() if pattern.search(name)}


def _is_in_files(model: nn.Module, name: str) -> bool:
    prefix, _, key = name.rpartition(".")
    return not is_transient(model.get_submodule(prefix), key)


def _built_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel | None:
    """A model of the class and the config of *model* that is built in *dtype*, without values; None if that fails."""
    config = copy.deepcopy(model.config)
    # The class of a model that fsdp2 has sharded makes one that is not.
    make: Any = type(model)._from_config
    try:
        # A constructor may draw numbers on the CPU in any case.
        with torch.random.fork_rng(devices=[]):
            built: PreTrainedModel = on_meta(lambda: make(config, dtype=dtype))
    except Exception:
        # Whatever the code of a model raises.
        log.debug("the model cannot be built without memory", exc_info=True)
        return None
    return built
