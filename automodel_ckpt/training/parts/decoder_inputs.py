"""The inputs of a decoder, which follow from the labels, and the token with which they start."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedConfig

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.forward import model_without_adapters


def shifted(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """The inputs of the decoder [B, T] for *labels* [B, T], as *model* shifts them."""
    inner = model_without_adapters(model)
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    # FSMT writes into its argument.
    labels = labels.clone()
    if shift is not None:
        return shift(labels=labels)  # type: ignore[no-any-return]
    config = inner.config
    # Blenderbot and M2M100 have the function alone. fsdp2 derives a class in another module.
    for kind in type(inner).__mro__:
        function = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
        if function is not None:
            return function(labels, config.pad_token_id, config.decoder_start_token_id)  # type: ignore[no-any-return]
    raise RecipeError(
        "this model does not state how the inputs of its decoder follow from the labels",
        where="model",
        value=type(inner).__name__,
        hint="let dataloader.collate_fn return decoder_input_ids",
    )


def start_token(config: PreTrainedConfig | None) -> int | None:
    """The token with which the decoder starts; None if the configuration does not state it (mBART: the language)."""
    token = getattr(config, "decoder_start_token_id", None)
    if token is None:
        # T5Gemma.
        token = getattr(getattr(config, "decoder", None), "bos_token_id", None)
    return token if isinstance(token, int) else None
