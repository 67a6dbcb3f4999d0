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

from automodel_ckpt.models.meta_init import CANNOT_BUILD, is_transient, on_meta

log = logging.getLogger("automodel_ckpt")

_OF_ADAPTERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""What peft inserts into the names of the parameters that it wraps."""


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
    """The names of the parameters and buffers that *model* keeps in float32, by the dtype code of the others."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    found: dict[str, frozenset[str]] = {}
    for code, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        pattern = float32_pattern(model, dtype)
        if pattern is not None:
            found[code] = frozenset(name for name in names if pattern.search(name))
    return found


def float32_names(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """The names of the parameters that *model*, which may have adapters, keeps in float32 if it computes in *dtype*.

    Batch normalization with running statistics in float32 is among them: torch requires weights of the same type.
    """
    found: set[str] = set()
    pattern = float32_pattern(model, dtype)
    if pattern is not None:
        for name, _ in model.named_parameters(remove_duplicate=False):
            if pattern.search(_OF_ADAPTERS.sub("", name)):
                found.add(name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        mean = getattr(module, "running_mean", None)
        if isinstance(module, _BatchNorm) and mean is not None and mean.dtype == torch.float32:
            found.update(name for name, _ in module.named_parameters(prefix))
    return frozenset(found)


def constants_in(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """The names of the buffers of *model* that it would create in *dtype* if it were built in this type.

    Those are constants that no file contains, such as tables of positions. Activations that are computed with one in
    float32 would be in float32, which layers with weights in *dtype* cannot use. Empty for a model that is not of
    transformers.
    """
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and dtype is not None:
            built = _built_in(module, dtype)
            prefix = f"{prefix}." if prefix else ""
            for name, buffer in _transient_buffers(module).items():
                other = built.get(_OF_ADAPTERS.sub("", name))
                if other is not None and other.dtype == dtype != buffer.dtype:
                    found.add(prefix + name)
            break
    return frozenset(found)


def _transient_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            key = name.rpartition(".")[2]
            if is_transient(module, key) and buffer.is_floating_point():
                found[name] = buffer
    return found


def _built_in(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The buffers of a model of the class and the config of *model* that is built in *dtype*, without values."""
    if all(each.dtype == dtype for each in _transient_buffers(model).values()):
        return {}
    config = copy.deepcopy(model.config)
    try:
        make: Any = type(model)._from_config
        built = on_meta(lambda: make(config, dtype=dtype))
    except CANNOT_BUILD:
        log.debug("the model cannot be built without memory", exc_info=True)
        return {}
    return _transient_buffers(built)
