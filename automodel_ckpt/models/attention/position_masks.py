"""Masks of samples that share a row, for models of transformers that do not look for them in the position ids.

Some models (GPT-OSS, AFMoE) build their masks without position ids, so that attention crosses from one sample of a row
to the next. Their forward passes accept prepared masks, which ``generate`` uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from automodel_ckpt.models.attention.mask_functions import create_without_cache
from automodel_ckpt.models.inspect.forward import model_without_adapters

_NAMES = {"input_ids", "inputs_embeds", "attention_mask", "position_ids"}


def mask_by_positions(model: nn.Module) -> RemovableHandle | None:
    """Pass masks by the position ids to the decoder of *model*; returns what undoes it, or None without a decoder.

    Whether the decoder uses the masks has to be probed. Passes with a cache or a mask are not changed.
    """
    outer: Any = model_without_adapters(model)
    if not isinstance(outer, PreTrainedModel):
        return None
    decoder: Any = outer.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(decoder, PreTrainedModel):
        return None
    parameters = inspect.signature(decoder.forward).parameters
    if not parameters.keys() >= _NAMES:
        return None
    return decoder.register_forward_pre_hook(_add_masks, with_kwargs=True)


def _add_masks(
    decoder: Any, args: tuple[Any, ...], inputs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook that adds the masks to the *inputs* of a forward pass of *decoder*."""
    positions = inputs.get("position_ids")
    has_other = _has(inputs, "attention_mask") or _has(inputs, "past_key_values")
    if args or positions is None or positions.dim() != 2 or has_other:
        return None
    given = inputs["inputs_embeds"] if _has(inputs, "inputs_embeds") else inputs["input_ids"]
    # Only its shape, dtype and device are read.
    like = torch.empty((*given.shape[:2], 0), dtype=_dtype(decoder, given), device=given.device)
    masks = create_without_cache(
        create_masks_for_generate,
        config=decoder.config,
        inputs_embeds=like,
        attention_mask=None,
        position_ids=positions,
    )
    return args, {**inputs, "attention_mask": masks}


def _has(inputs: Mapping[str, Any], name: str) -> bool:
    return inputs.get(name) is not None


def _dtype(decoder: nn.Module, given: torch.Tensor) -> torch.dtype:
    """The type of masks that are added to scores: the one that *decoder* computes in."""
    device_type = given.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    if given.is_floating_point():
        return given.dtype
    return next(decoder.parameters()).dtype
