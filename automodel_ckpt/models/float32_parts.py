"""The parts of a transformers model that stay in float32 while the others are in 16 bits."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

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
    """The names of the parameters that *model*, which may have adapters, keeps in float32 if it computes in *dtype*."""
    pattern = float32_pattern(model, dtype)
    if pattern is None:
        return frozenset()
    found: set[str] = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        if pattern.search(_OF_ADAPTERS.sub("", name)):
            found.add(name)
    return frozenset(found)
