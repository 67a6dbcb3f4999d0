"""Validate the configuration of a model: the task, the length of samples, the vocabulary."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from automodel_ckpt.errors import RecipeError

_RANGES = (
    (r"(layers?|blocks?|depths?)$", -math.inf, 10_000),
    (
        r"(vocab_size|hidden_size|intermediate_size|d_model|d_ff|n_embd|dim|heads)$",
        -math.inf,
        1 << 28,
    ),
    (r"(positions?|position_embeddings|experts)$", -math.inf, 1 << 32),
    (r"num_labels$", -math.inf, 1 << 24),
    (r"(dropout|pdrop|dropout_rate|dropout_prob)$", 0, 1),
)
"""The least and the largest values of settings by the ends of their names. Models have far smaller sizes."""
_FLOAT = "__float__"
_FLOATS = ("Infinity", "-Infinity", "NaN")


def config_of_layer(config: Any, number: int) -> Any:
    """The configuration of decoder layer *number*; *config* itself if all layers have the same.

    Also *config* itself for layers beyond the model's, such as layers of multi-token prediction.
    """
    layers = layer_configs(config)
    return layers[number] if number < len(layers) else config


def layer_configs(config: Any) -> list[Any]:
    """The configurations of all layers; only *config* itself if all layers have the same."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    return list(config.per_layer_config)


def context_length(config: Any) -> int | None:
    """The number of tokens up to which a text model has positions. None when its configuration states no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    # XLNet has -1: no limit.
    return limit if isinstance(limit, int) and limit > 0 else None


def decoded_floats(value: Any) -> Any:
    """Return the content of a config.json with its numbers that JSON does not have: infinity and NaN.

    transformers (5.23, ``PreTrainedConfig.to_json_string``) writes them as ``{"__float__": "Infinity"}``.
    """
    if isinstance(value, list):
        return [decoded_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS:
        return float(value[_FLOAT])
    return {key: decoded_floats(each) for key, each in value.items()}


def check_sizes(settings: Mapping[str, Any], where: str) -> None:
    """Check the *settings* of a model in the config.json *where*, also of its parts.

    Raises :class:`RecipeError` for a size with which building the model would not end, and for a rate of dropout that
    is none, which only fails in training.
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            check_sizes(value, where)
        if not isinstance(value, int | float):
            continue
        for pattern, least, most in _RANGES:
            if re.search(pattern, key) and not least <= value <= most:
                raise RecipeError(
                    "no model has this value",
                    where=where,
                    value=f"{key}: {str(value)[:40]}",
                    hint="correct the value, or download the model again",
                )


def check_task(config: PreTrainedConfig, auto_class: Any) -> None:
    """Raise :class:`RecipeError` if the recipe's *auto_class* of transformers does not support the model."""
    # Private in transformers 5.17 to 5.24. Custom classes may have no mapping.
    mapping = getattr(auto_class, "_model_mapping", None)
    remote_classes = getattr(config, "auto_map", None) or {}
    architectures = getattr(config, "architectures", None) or ()
    is_seq2seq = (
        config.is_encoder_decoder and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    )
    seq2seq: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)] if is_seq2seq else None
    # BART has a class for the decoder alone, too.
    is_whole = seq2seq is not None and seq2seq.__name__ in architectures
    is_known = mapping is None or type(config) in mapping or auto_class.__name__ in remote_classes
    if is_known and not (is_whole and auto_class is AutoModelForCausalLM):
        _check_causality(config, auto_class)
        return
    listed = ", ".join(architectures) or "no class listed in its config"
    hint = (
        "name a causal language model, or for a vision-language model recipe: vlm_finetune; encoders need a recipe of "
        "your own"
    )
    if is_seq2seq:
        hint = "train a model with an encoder and a decoder with recipe: seq2seq"
    elif auto_class is AutoModelForSeq2SeqLM:
        hint = "name a model with an encoder and a decoder, such as T5 or BART; recipe: llm_finetune trains decoders"
    raise RecipeError(
        "this recipe does not support this kind of model",
        where="model",
        value=f"a {config.model_type} model ({listed}), which {auto_class.__name__} does not support as a whole",
        hint=hint,
    )


def check_layer_drop(config: PreTrainedConfig) -> None:
    """Raise :class:`RecipeError` for a model that leaves out whole layers at random in training (LayerDrop).

    Each rank would leave out other layers, and wait for the others in the next one.
    """
    rates = {}
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        rate = getattr(config, name, None)
        if rate:
            rates[name] = rate
    if rates:
        zeros = ", ".join(f"{name}: 0.0" for name in rates)
        raise RecipeError(
            "this model leaves out layers at random in training (LayerDrop), which is not supported",
            where="model",
            value=", ".join(f"{name}: {rate}" for name, rate in rates.items()),
            hint=f"set model.config_overrides: {{{zeros}}}",
        )


def _check_causality(config: PreTrainedConfig, auto_class: Any) -> None:
    """Raise :class:`RecipeError` for an encoder such as BERT, which sees the tokens that it would learn to predict."""
    setting = _setting_of_encoder(config.get_text_config())
    if auto_class is not AutoModelForCausalLM or setting is None:
        return
    name, value, causal = setting
    hint = "name a causal language model; recipe: sequence_classification and recipe: embedding train encoders"
    if causal:
        override = f"model.config_overrides: {{{name}: {causal}}}"
        hint += f"; or let tokens see only earlier ones with {override}"
    raise RecipeError(
        "this model is an encoder: each token sees the later ones, which it would learn to predict",
        where="model",
        value=f"a {config.model_type} model with {name}: {value}",
        hint=hint,
    )


def sees_later_tokens(config: PreTrainedConfig) -> bool:
    """Whether each token sees the later ones, as in an encoder."""
    return _setting_of_encoder(config.get_text_config()) is not None


def _setting_of_encoder(config: PreTrainedConfig) -> tuple[str, str, str] | None:
    """Return the setting that lets tokens see later ones, or None when the model is causal.

    The setting is its name, its value, and the value with which the model is causal. The last one is empty if the model
    would differ in more than this setting.
    """
    # Some decoders have an is_decoder of False too, but no class for masked tokens. BertGeneration has none either.
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    is_encoder = is_encoder or config.model_type == "bert-generation"
    # XLM and FlauBERT have the second one.
    for name in ("is_decoder", "causal"):
        if is_encoder and not getattr(config, name, True):
            return name, "false", "true"
    # XLNet learns permutations of a sequence, with masks that a recipe does not have.
    if config.model_type == "xlnet" and config.attn_type == "bi":
        return "attn_type", "bi", "uni"
    # Gemma, as in EmbeddingGemma; "vision" concerns the tokens of an image only. Its config has already halved the
    # sliding window when overrides are applied.
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if bidirectional in (True, "all"):
        return "use_bidirectional_attention", str(bidirectional).lower(), ""
    # transformers' masks follow it for any model.
    if getattr(config, "is_causal", True) is False:
        return "is_causal", "false", "true"
    return None


def check_context(config: PreTrainedConfig, seq_length: int, where: str) -> None:
    """Raise :class:`RecipeError` if samples of *seq_length* tokens are longer than the model's context."""
    limit = context_length(config)
    if limit is not None and seq_length > limit:
        raise RecipeError(
            "samples may be longer than the model's context",
            where=where,
            value=f"{seq_length} tokens; the model's max_position_embeddings is {limit}",
            hint=f"set it to {limit} or less, or use a model with a longer context",
        )


def check_vocabulary(config: PreTrainedConfig, tokenizer: Any, *, size: int | None = None) -> None:
    """Raise :class:`RecipeError` if the tokenizer has ids without an embedding in the model.

    *size* is the value of ``model.vocab_size``; None is the size of the model's vocabulary.
    """
    size = size or getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is not None and isinstance(size, int) and len(tokenizer) > size:
        raise RecipeError(
            "the tokenizer has more tokens than the model's vocabulary",
            where="tokenizer",
            value=f"{len(tokenizer)} tokens; the model's vocab_size is {size}",
            hint="set model.vocab_size tokenizer, so that the model gets room for them; or use the model's own "
            "tokenizer (leave the tokenizer section out)",
        )
