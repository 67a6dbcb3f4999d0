"""Read or create the configuration of a model, and validate its settings, before weights are created or read."""

from __future__ import annotations

import copy
import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.config_checks import check_sizes
from automodel_ckpt.models.inspect.error_texts import did_you_mean, first_line
from automodel_ckpt.models.inspect.repository import (
    RepositoryOptions,
    check_code,
    check_revision,
    config_needs_code,
    damaged_config,
    importing_code,
    model_needs_code,
    reject_other_weights,
    require_local,
)
from automodel_ckpt.models.inspect.vision import image_settings, thinker_of

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
    "auto_map": "the code of a model is that of its repository",
    "quantization_config": "set peft.quantize_base to quantize; quantized files need no setting",
}
"""Settings that are not overridden, and what to do instead."""


def load_model_config(
    *,
    from_pretrained: str | None = None,
    from_config: Mapping[str, Any] | str | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    overrides: Mapping[str, Any] | None = None,
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
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config of a directory or Hub name, and the content of its config.json."""
    path = os.path.expanduser(name)
    content: dict[str, Any] = {}
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
    settings: dict[str, Any], tokenizer: Any, processor: Any, overrides: Mapping[str, Any]
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
        _check(
            _unknown(default, name, value, "model.from_config")
            for name, value in settings.items()
            if not hasattr(default, name) and name not in older
        )
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
        hint="correct the value; the model type's config.json has these settings",
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
    settings: dict[str, Any], default: PreTrainedConfig, tokenizer: Any, processor: Any
) -> dict[str, Any]:
    """Complete *settings* from the tokenizer and the processor; a model of several parts has a section for text."""
    of_tokenizer: dict[str, Any] = {}
    if tokenizer is not None:
        of_tokenizer = {name: getattr(tokenizer, name, None) for name in _SPECIAL_IDS}
        of_tokenizer["vocab_size"] = len(tokenizer)
    if "text_config" not in default.sub_configs:
        # T5 has no start token.
        known = {key: value for key, value in of_tokenizer.items() if hasattr(default, key)}
        return {**known, **settings}
    text = {**of_tokenizer, **(settings.get("text_config") or {})}
    return {**image_settings(processor, default), **settings, "text_config": text}


def merged_config(
    content: Mapping[str, Any], config: PreTrainedConfig, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the *content* of a config.json with *overrides*, which may be nested.

    *config* is the object that transformers makes of *content*; its class validates the types of values. Raises
    :class:`RecipeError` with every setting that it does not have.
    """
    _check(_problems(config, overrides, "model.config_overrides"))
    return _merged(content, config, overrides)


def _check(problems: Iterable[Problem]) -> None:
    if found := list(problems):
        raise RecipeError.all_of(found)


def _unknown(config: Any, name: str, value: Any, key: str) -> Problem:
    what = f"{config.model_type or type(config).__name__} models have no setting {name!r}"
    return Problem(what, f"{key}.{name}", value, did_you_mean(name, _settings(config)))


def _problems(config: Any, overrides: Mapping[str, Any], key: str) -> Iterator[Problem]:
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
                yield Problem("this is a section of settings", where, value, "give a mapping")


def _settings(config: Any) -> set[str]:
    names = {*vars(config), *type(config).attribute_map, *type(config).sub_configs}
    return {name for name in names if not name.startswith("_") and hasattr(config, name)}


def _merged(
    content: Mapping[str, Any], config: Any, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    aliases: Mapping[str, str] = type(config).attribute_map
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


def _deep_merged(present: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(present)
    for name, item in value.items():
        before = merged.get(name)
        if isinstance(item, Mapping) and isinstance(before, Mapping):
            item = _deep_merged(before, item)
        merged[name] = item
    return merged
