"""What the recipe ``seq2seq`` requires of a model: its loss, and the inputs of its decoder."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedConfig

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.forward import class_and_message, model_without_adapters


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
    """The token with which the decoder starts.

    Returns None when the configuration does not state it (mBART: the language).
    """
    token = getattr(config, "decoder_start_token_id", None)
    if token is None:
        # T5Gemma.
        token = getattr(getattr(config, "decoder", None), "bos_token_id", None)
    return token if isinstance(token, int) else None


_START_HINT = (
    "set decoder_start_token_id and pad_token_id in model.from_config, or in model.config_overrides"
)


def check_forward(config: PreTrainedConfig) -> None:
    """Raise :class:`RecipeError` for a model with another loss than next-token prediction, or with a loss that depends
    on earlier passes."""
    ngram = getattr(config, "ngram", 1)
    if ngram != 1:
        raise RecipeError(
            "this model also predicts later tokens at each position, which the recipe seq2seq does not train",
            where="model",
            value=f"a {config.model_type} model with ngram: {ngram}",
            hint="use another model, such as BART",
        )
    # NLLB's experts keep the capacity that an evaluation pass computes from its number of tokens.
    fraction = getattr(config, "moe_eval_capacity_token_fraction", 0)
    if fraction > 0:
        raise RecipeError(
            "evaluation passes of this model change how many tokens its experts accept in training",
            where="model",
            value=f"a {config.model_type} model with moe_eval_capacity_token_fraction: {fraction}",
            hint="set model.config_overrides: {moe_eval_capacity_token_fraction: 0.0}",
        )


def check_shift(model: Any, config: PreTrainedConfig) -> None:
    """Raise :class:`RecipeError` if the inputs of the decoder of *model* cannot follow from labels."""
    token = 1 if getattr(config, "pad_token_id", None) == 0 else 0
    try:
        first = int(shifted(model, torch.tensor([[token, token]]))[0, 0])
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(
            "the inputs of the decoder cannot follow from the labels",
            where="model",
            value=class_and_message(error),
            hint=_START_HINT,
        ) from error
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if size is not None and not 0 <= first < size:
        raise RecipeError(
            "the decoder starts with a token that is not in its vocabulary",
            where="model",
            value=f"token {first} of {size}",
            hint=_START_HINT,
        )
