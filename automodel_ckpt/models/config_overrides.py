"""Settings of ``model.config_overrides``, merged into the config of a model before it is built."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from automodel_ckpt.errors import Problem, RecipeError

_KEY = "model.config_overrides"
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


def merged_config(
    content: Mapping[str, Any], config: PreTrainedConfig, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return *content*, that of a config.json, with *overrides*, which may be nested.

    *config* is the object that transformers makes of *content*. Raises :class:`RecipeError` with every setting that it
    does not have, and with every value that has another type than the present one.
    """
    problems = list(_problems(config, overrides, _KEY))
    if problems:
        raise RecipeError.all_of(problems)
    return _merged(content, config, overrides)


def _problems(config: Any, overrides: Mapping[str, Any], key: str) -> Iterator[Problem]:
    known = _settings(config)
    for name, value in overrides.items():
        where = f"{key}.{name}"
        if name in _OTHER_KEYS:
            yield Problem("this setting is not overridden here", where, value, _OTHER_KEYS[name])
        elif name.startswith("_") or name not in known:
            what = f"{config.model_type or type(config).__name__} models have no setting {name!r}"
            yield Problem(what, where, value, _hint(name, known))
        else:
            yield from _value_problems(getattr(config, name), value, where)


def _value_problems(present: Any, value: Any, where: str) -> Iterator[Problem]:
    if isinstance(present, PreTrainedConfig):
        if isinstance(value, Mapping):
            yield from _problems(present, value, where)
        else:
            yield Problem("this is a section of settings", where, value, "give a mapping")
        return
    if not _has_type_of(present, value):
        hint = f"the model has {present!r}"
        yield Problem(f"this setting is a {_kind(present)}", where, value, hint)


def _has_type_of(present: Any, value: Any) -> bool:
    """Whether *value* can replace *present*. transformers validates what its own classes declare more exactly."""
    if present is None or value is None:
        return True
    if isinstance(present, list | tuple) or isinstance(value, list | tuple):
        # The id of a token can be a number or a list of numbers.
        return not isinstance(value, str | Mapping | bool)
    if isinstance(present, bool) or isinstance(value, bool):
        return isinstance(present, bool) and isinstance(value, bool)
    if isinstance(present, int):
        return isinstance(value, int)
    if isinstance(present, float):
        return isinstance(value, int | float)
    if isinstance(present, str):
        return isinstance(value, str)
    return isinstance(value, Mapping) or not isinstance(present, Mapping)


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "whole number", float: "number", str: "text", dict: "mapping"}
    return names.get(type(value), "list")


def _settings(config: Any) -> set[str]:
    names = {*vars(config), *type(config).attribute_map, *type(config).sub_configs}
    return {name for name in names if not name.startswith("_") and hasattr(config, name)}


def _hint(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"there are, for example, {', '.join(sorted(known)[:5])}"


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
