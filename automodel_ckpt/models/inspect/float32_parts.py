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

from automodel_ckpt.models.meta_init import on_meta

log = logging.getLogger("automodel_ckpt")

_OF_ADAPTERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""What peft inserts into the names of the parameters that it wraps."""
_COMPUTES_IN_ONE_TYPE = ("deberta", "xlnet")
"""Models that create parameters in float32 and cannot compute with them in 16 bits."""
_FACTORS_IN_FILES = re.compile(r"\.(slope_rate|\w+_decay)$")
"""Buffers in files by which MiniMax multiplies activations. Others stay in float32, such as the biases of routers,
which would select other experts."""
_HALF = (torch.bfloat16, torch.float16)


def float32_pattern(model: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """What the names of the parameters and buffers contain that *model* keeps in float32 in a model of type *dtype*.

    ``from_pretrained`` searches names in the same way: the entries of ``_keep_in_fp32_modules_strict``, with float16
    also the entries of ``_keep_in_fp32_modules``, are regular expressions in which ``*`` is any text. None: no name
    does.
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
    created: set[str] = set()
    names = _names_in(model)
    # A constructor does not distinguish the types of 16 bits.
    built = _built_in(model, torch.bfloat16)
    if built is not None:
        state = built.state_dict(keep_vars=True)
        created = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
        names |= _names_in(built)
    found: dict[str, frozenset[str]] = {}
    for code, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        pattern = float32_pattern(model, dtype)
        if kept := created | {name for name in names if pattern and pattern.search(name)}:
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
    pattern = float32_pattern(model, dtype)
    prefix, inner = _of_transformers(model)
    built = _built_in(inner, dtype) if dtype in _HALF else None
    created: set[str] = set()
    if built is not None and built.config.model_type not in _COMPUTES_IN_ONE_TYPE:
        for name, parameter in built.named_parameters(remove_duplicate=False):
            if parameter.dtype == torch.float32:
                created.add(name)
    found: set[str] = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        plain = _OF_ADAPTERS.sub("", name)
        if (pattern and pattern.search(plain)) or plain.removeprefix(prefix) in created:
            found.add(name)
    for name, module in model.named_modules(remove_duplicate=False):
        mean = getattr(module, "running_mean", None)
        if isinstance(module, _BatchNorm) and mean is not None and mean.dtype == torch.float32:
            found.update(each for each, _ in module.named_parameters(name))
    return frozenset(found)


def _of_transformers(model: nn.Module) -> tuple[str, nn.Module]:
    """The outermost model of transformers in *model*, or itself, and the prefix of the names of its parameters."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return f"{name}." if name else "", module
    return "", model


def constants_in(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """The names of the buffers of *model* that it would create in *dtype* if it were built in this type.

    Those are constants that no file contains, such as tables of positions, and a few factors of activations in files.
    Activations that are computed with one in float32 would be in float32, which layers with weights in *dtype* cannot
    use. Empty for a model that is not of transformers.
    """
    prefix, inner = _of_transformers(model)
    buffers = {name: each.dtype for name, each in inner.named_buffers() if each.is_floating_point()}
    if dtype is None or set(buffers.values()) <= {dtype}:
        return frozenset()
    built = _built_in(inner, dtype)
    if built is None:
        return frozenset()
    in_files = built.state_dict(keep_vars=True)
    created = {
        name: each.dtype
        for name, each in built.named_buffers()
        if name not in in_files or _FACTORS_IN_FILES.search(name)
    }
    tables = {
        prefix + name
        for name, stored in buffers.items()
        if created.get(_OF_ADAPTERS.sub("", name)) == dtype != stored
    }
    return frozenset(tables)


def _built_in(model: nn.Module, dtype: torch.dtype | None) -> PreTrainedModel | None:
    """A model of the class and the config of *model* that is built in *dtype*, without values.

    None when that fails, and for a model that is not of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        return None
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
