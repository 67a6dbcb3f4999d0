"""Read or create the configuration of a model, and validate its settings, before weights are created or read."""

from __future__ import annotations

import copy
import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict, Values
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.inspect.interface import (
    did_you_mean,
    first_line,
    image_settings,
    thinker_of,
)
from automodel_ckpt.models.inspect.repository import (
    RepositoryOptions,
    check_code,
    check_revision,
    check_sizes,
    config_needs_code,
    damaged_config,
    importing_code,
    model_needs_code,
    reject_other_weights,
    require_local,
)

log = logging.getLogger("automodel_ckpt")

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OLDER_ROTARY = ("rope_theta", "rope_scaling", "partial_rotary_factor")
_MAIN_REVISION = RepositoryOptions()
_OTHER_KEYS = {
    "dtype": "set model.dtype instead",
    "torch_dtype": "set model.dtype instead",
    "attn_implementation": "set model.attn_implementation instead",
    "vocab_size": "set model.vocab_size instead, which resizes the embedding",
    "model_type": "name another model in model.from_pretrained",
    "architectures": "name another model in model.from_pretrained",
    "auto_map": "a model's code comes from its repository",
    "quantization_config": "set peft.quantize_base to quantize; quantized files need no setting",
}
"""Settings that are not overridden, and what to do instead."""


def load_model_config(
    *,
    from_pretrained: str | None = None,
    from_config: Values | str | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    overrides: Values | None = None,
    repository: RepositoryOptions = _MAIN_REVISION,
    auto_class: Any = None,
) -> PreTrainedConfig:
    """Read or create the transformers configuration of the model, without reading weights.

    If a *from_config* mapping does not set them, ``vocab_size`` and the ids of special tokens come from *tokenizer*,
    and the ids of image tokens from *processor*. *overrides* are settings that replace the config's; they may be
    nested. *auto_class* is the class of transformers that will build the model; None: no check of its code.

    Raises :class:`RecipeError` for a missing or unreadable configuration, for settings that this type of model does not
    have, and for a model with code in its repository, unless *repository* allows to run it.
    """
    changes = overrides or {}
    name, where = from_pretrained, "model.from_pretrained"
    if name is None and isinstance(from_config, str):
        name, where = from_config, "model.from_config"
    if name is None:
        assert not isinstance(from_config, str)
        settings = dict(from_config or {})
        return thinker_of(_config_from_mapping(settings, tokenizer, processor, changes))
    require_local(name, where)
    reject_other_weights(name, where)
    check_revision(name, repository.revision)
    config, content = _config_of(name, where, repository)
    if changes:
        merged = merged_config(content, config, changes)
        try:
            changed = type(config).from_dict(merged)
        except (ValueError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
            raise _rejected(config.model_type, "model.config_overrides", error) from error
        changed.name_or_path = config.name_or_path
        config = changed
    if not config_needs_code(content):
        if model_needs_code(config, auto_class):
            check_code(name, where, content, repository)
        elif repository.requests_code:
            log.info(
                "model.trust_remote_code has no effect: transformers includes this type of model"
            )
    return thinker_of(config)


def _config_of(
    name: str, where: str, repository: RepositoryOptions
) -> tuple[PreTrainedConfig, ValueDict]:
    """The config of a directory or Hub name, and the content of its config.json."""
    path = os.path.expanduser(name)
    content: ValueDict = {}
    try:
        content, _ = PreTrainedConfig.get_config_dict(path, revision=repository.revision)
        check_sizes(content, f"config.json of {name}")
        needs_code = config_needs_code(content)
        if needs_code:
            check_code(name, where, content, repository)
        with importing_code(needs_code):
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                path, trust_remote_code=needs_code, revision=repository.revision
            )
        return config, content
    except RecipeError:
        raise
    except Exception as error:  # transformers raises many classes for damaged files
        revision = repository.revision
        if known := explained(error, name, where) or damaged_config(name, where, revision):
            raise known from error
        kind = content.get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING:
            raise _unknown_type(kind, where, f"{name}: model_type {kind}") from error
        raise RecipeError(
            "the model's configuration cannot be read",
            where=where,
            value=f"{name} ({first_line(error)})",
            hint="name a directory with a config.json; a Hub name needs the network or a filled cache, and for a "
            "model that asks for it a login (hf auth login)",
        ) from error


def _config_from_mapping(
    settings: ValueDict, tokenizer: Any, processor: Any, overrides: Values
) -> PreTrainedConfig:
    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise _unknown_type(model_type, "model.from_config.model_type", model_type)
    config_class = CONFIG_MAPPING[model_type]
    try:
        default = config_class()
        settings = _completed(settings, default, tokenizer, processor)
        # transformers moves these into rope_parameters, because config.json had them before version 5.
        older = _OLDER_ROTARY if hasattr(default, "rope_parameters") else ()
        # It would store unknown ones as attributes and build the model without them.
        unknown = [
            _unknown(default, name, value, "model.from_config")
            for name, value in settings.items()
            if not hasattr(default, name) and name not in older
        ]
        RecipeError.check(unknown)
        settings = merged_config(settings, default, overrides)
        check_sizes(settings, "model.from_config")
        return config_class(**copy.deepcopy(settings))
    except (ValueError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
        raise _rejected(model_type, "model.from_config", error) from error


def _rejected(model_type: object, where: str, error: Exception) -> RecipeError:
    return RecipeError(
        f"transformers rejects this configuration of a {model_type} model",
        where=where,
        value=first_line(error, 3),
        hint="",
    )


def _unknown_type(model_type: object, where: str, value: object) -> RecipeError:
    near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
    hint = "name a type such as llama, qwen3 or gpt2, or install a version of transformers that has this type"
    return RecipeError(
        "transformers has no models of this type",
        where=where,
        value=f"{value}; transformers {transformers.__version__}",
        hint=f"did you mean {' or '.join(near)}?" if near else hint,
    )


def _completed(
    settings: ValueDict, default: PreTrainedConfig, tokenizer: Any, processor: Any
) -> ValueDict:
    """Complete *settings* from the tokenizer and the processor; a model of several parts has a section for text."""
    of_tokenizer: ValueDict = {}
    if tokenizer is not None:
        of_tokenizer = {name: getattr(tokenizer, name, None) for name in _SPECIAL_IDS}
        of_tokenizer["vocab_size"] = len(tokenizer)
    if "text_config" not in default.sub_configs:
        # T5 has no start token.
        known = {key: value for key, value in of_tokenizer.items() if hasattr(default, key)}
        return {**known, **settings}
    text = {**of_tokenizer, **(settings.get("text_config") or {})}
    return {**image_settings(processor, default), **settings, "text_config": text}


def merged_config(content: Values, config: PreTrainedConfig, overrides: Values) -> ValueDict:
    """Return the *content* of a config.json with *overrides*, which may be nested.

    *config* is the object that transformers makes of *content*; its class validates the types of values. Raises
    :class:`RecipeError` with every setting that it does not have.
    """
    RecipeError.check(list(_problems(config, overrides, "model.config_overrides")))
    return _merged(content, config, overrides)


def _unknown(config: Any, name: str, value: Any, key: str) -> Problem:
    what = f"{config.model_type or type(config).__name__} models have no setting {name!r}"
    return Problem(what, f"{key}.{name}", value, did_you_mean(name, _settings(config)))


def _problems(config: Any, overrides: Values, key: str) -> Iterator[Problem]:
    known = _settings(config)
    for name, value in overrides.items():
        where = f"{key}.{name}"
        if name in _OTHER_KEYS:
            yield Problem("this setting is not overridden here", where, value, _OTHER_KEYS[name])
        elif name not in known:
            yield _unknown(config, name, value, key)
        elif isinstance(present := getattr(config, name), PreTrainedConfig):
            if isinstance(value, Mapping):
                yield from _problems(present, value, where)
            else:
                yield Problem(
                    "this is a section of settings, which needs a mapping", where, value, ""
                )


def _settings(config: Any) -> set[str]:
    names = {*vars(config), *type(config).attribute_map, *type(config).sub_configs}
    return {name for name in names if not name.startswith("_") and hasattr(config, name)}


def _merged(content: Values, config: Any, overrides: Values) -> ValueDict:
    aliases: Texts = type(config).attribute_map
    merged = dict(content)
    for name, value in overrides.items():
        canonical = aliases.get(name, name)
        present = getattr(config, canonical)
        if isinstance(present, PreTrainedConfig):
            section = merged.get(name) or {}
            value = _merged(section, present, value)
        elif isinstance(value, Mapping) and isinstance(present, Mapping):
            value = _deep_merged(present, value)
        # The file may use the other name of the same setting.
        for alias, target in aliases.items():
            if target == canonical:
                merged.pop(alias, None)
        merged[canonical] = value
    return merged


def _deep_merged(present: Values, value: Values) -> ValueDict:
    merged = dict(present)
    for name, item in value.items():
        before = merged.get(name)
        if isinstance(item, Mapping) and isinstance(before, Mapping):
            item = _deep_merged(before, item)
        merged[name] = item
    return merged


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
