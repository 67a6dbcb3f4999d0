"""Keys of config.json that programs before transformers 5 read. Imports no torch.

transformers 5 writes the settings of rotary positions as one mapping, ``rope_parameters``, and gave other settings new
names. transformers 4 and programs that have their own readers (mlx-lm 0.32) ignore the new names: they compute with
their defaults (a rotary base of 10000), without an error. transformers 5 reads both.
"""

from __future__ import annotations

from collections.abc import Callable

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values

_PARAMETERS = "rope_parameters"
_KIND = "rope_type"
_THETA = "rope_theta"
_PARTIAL = "partial_rotary_factor"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Types of model with other names of the older keys for the base and for the rotated part.
_GPT_NEOX = {_THETA: "rotary_emb_base", _PARTIAL: "rotary_pct"}
_OTHER_NAMES = {"gpt_neox": _GPT_NEOX, "gpt_neox_japanese": _GPT_NEOX}
# Types of model with positions by the kind of a layer: the older keys of the bases of full and of sliding attention,
# which are the same where both have one base.
_BASES = {
    "gemma3_text": (_THETA, "rope_local_base_freq"),
    "gemma3n_text": (_THETA, "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
    "olmo3": (_THETA, _THETA),
}
# {older name: name in transformers 5}, also by the type of model. Programs of 2025 read torch_dtype.
_DTYPE = {"torch_dtype": "dtype"}
_EXPERTS = {"num_experts": "num_local_experts"}
_RENAMED = {
    "qwen3_moe": _EXPERTS,
    "qwen3_vl_moe_text": _EXPERTS,
    "qwen3_omni_moe_text": _EXPERTS,
    "qwen3_omni_moe_talker_text": _EXPERTS,
}
_MAX_DEPTH = 20


def with_older_keys(config: Values, *, depth: int = 0) -> ValueDict:
    """Return *config*, the content of config.json, with the older keys of what it and its parts state.

    Keys that it has are unchanged.
    """
    return {**_older_keys(config), **_with_parts(config, with_older_keys, depth)}


def without_older_keys(config: Values, *, depth: int = 0) -> ValueDict:
    """Return *config* without the older keys that repeat what it states."""
    older = _older_keys(config)
    changed = _with_parts(config, without_older_keys, depth)
    return {
        key: value
        for key, value in changed.items()
        if key not in older or config[key] != older[key]
    }


def _with_parts(config: Values, change: Callable[..., ValueDict], depth: int) -> ValueDict:
    """Return *config* with its changed parts."""
    changed = {}
    for key, value in config.items():
        is_part = key.endswith("_config") and isinstance(value, dict) and depth < _MAX_DEPTH
        changed[key] = change(value, depth=depth + 1) if is_part else value
    return changed


def _older_keys(config: Values) -> ValueDict:
    """Return the older keys of what *config* itself states."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return {}
    found = {
        older: config[name]
        for older, name in {**_DTYPE, **_RENAMED.get(kind, {})}.items()
        if name in config
    }
    parameters = config.get(_PARAMETERS)
    if isinstance(parameters, dict):
        found |= _positions(kind, parameters)
    return found


def _positions(kind: str, parameters: Values) -> ValueDict:
    """Return the older keys of the rotary *parameters*; none for those that no older key can state."""
    names = {_THETA: _THETA, _PARTIAL: _PARTIAL, **_OTHER_NAMES.get(kind, {})}
    found = {}
    if any(isinstance(value, dict) for value in parameters.values()):
        full, sliding = parameters.get(_FULL), parameters.get(_SLIDING)
        if kind not in _BASES or not isinstance(full, dict) or not isinstance(sliding, dict):
            return {}
        names[_THETA], local_name = _BASES[kind]
        if local_name == names[_THETA] and full.get(_THETA) != sliding.get(_THETA):
            return {}
        if _THETA in sliding:
            found[local_name] = sliding[_THETA]
        parameters = full
    for name, older in names.items():
        if name in parameters:
            found[older] = parameters[name]
    scaling = {name: value for name, value in parameters.items() if name not in names}
    if scaling.keys() - {_KIND} or scaling.get(_KIND, "default") != "default":
        found["rope_scaling"] = scaling
    return found
