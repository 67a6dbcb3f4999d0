"""Values of transformers' configurations: those that differ between layers, the context length, infinite numbers.

Values can differ between the layers of a model (``per_layer_config`` of transformers 5.23). It then raises an
error if one of these values is read for the whole model (Gemma 4: heads of full attention are wider than others).
"""

from __future__ import annotations

from typing import Any

_FLOAT = "__float__"
_FLOATS = ("Infinity", "-Infinity", "NaN")


def config_of_layer(config: Any, number: int) -> Any:
    """The configuration of decoder layer *number*; *config* itself if all layers have the same.

    Also *config* itself for layers beyond those of the model, such as those of multi-token prediction.
    """
    if not getattr(config, "is_heterogeneous", False):
        return config
    layers = config.per_layer_config
    return layers[number] if number < len(layers) else config


def layer_configs(config: Any) -> list[Any]:
    """The configurations of all layers; only *config* itself if all layers have the same."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    return list(config.per_layer_config)


def context_length(config: Any) -> int | None:
    """The number of tokens up to which a text model has positions; None if its configuration states no limit."""
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
