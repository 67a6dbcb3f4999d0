"""The dimensions of a transformer that conversions need, and what the arguments of Megatron-LM state of a config."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import CheckpointUnusable, unusable

# Arguments of Megatron-LM, by the keys of config.json.
_COUNTS = {
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "num_experts_per_tok": "moe_router_topk",
}
_NUMBERS = {"rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base"}


@dataclass(frozen=True)
class Dimensions:
    """Counts of a decoder. *num_query_groups* is the number of key-value heads, *head_size* the rows of one head.

    *vocab_size* is the number of embedding rows without padding. None: it is unknown, and rows are neither
    removed nor added. *num_experts* is 0 for a dense model.
    """

    num_layers: int
    num_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int | None = None
    num_experts: int = 0


def dimensions_of_config(config: Values, where: str) -> Dimensions:
    """Return the dimensions in the content of a Hugging Face ``config.json``, which is located at *where*.

    Raises :class:`CheckpointUnusable` if a dimension is missing or is not a positive integer.
    """
    num_heads = _count(config, "num_attention_heads", where)
    head_size = _optional_count(config, "head_dim", where)
    if head_size is None:
        hidden_size = _count(config, "hidden_size", where)
        if hidden_size % num_heads:
            raise _unusable("hidden_size", hidden_size, where)
        head_size = hidden_size // num_heads
    num_query_groups = _optional_count(config, "num_key_value_heads", where) or num_heads
    if num_heads % num_query_groups:
        raise _unusable("num_key_value_heads", num_query_groups, where)
    # Mixtral calls its experts local; Qwen 3 does not.
    num_experts = _optional_count(config, "num_local_experts", where)
    if num_experts is None:
        num_experts = _optional_count(config, "num_experts", where)
    return Dimensions(
        _count(config, "num_hidden_layers", where),
        num_heads,
        num_query_groups,
        head_size,
        _optional_count(config, "vocab_size", where),
        num_experts or 0,
    )


def config_of_arguments(arguments: Values) -> ValueDict:
    """Return what arguments of Megatron-LM state of the keys of ``config.json`` that the shapes do not show.

    Source of the names: megatron/training/arguments.py of Megatron-LM. A value that is not set, or is not usable, is
    left out.
    """
    found: ValueDict = {}
    for key, argument in _COUNTS.items():
        value = arguments.get(argument)
        if type(value) is int and value > 0:
            found[key] = value
    if not arguments.get("group_query_attention"):
        found.pop("num_key_value_heads", None)
        if "num_attention_heads" in found:
            found["num_key_value_heads"] = found["num_attention_heads"]
    for key, argument in _NUMBERS.items():
        value = arguments.get(argument)
        # A bool is an int.
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            found[key] = float(value)
    return found


def _optional_count(values: Values, key: str, where: str) -> int | None:
    return None if values.get(key) is None else _count(values, key, where)


def _count(values: Values, key: str, where: str) -> int:
    value = values.get(key)
    # Not isinstance: True is an int, too.
    if type(value) is not int or not 0 < value < 2**31:
        raise _unusable(key, value, where)
    return value


def _unusable(key: str, value: object, where: str) -> CheckpointUnusable:
    found = "not set" if value is None else str(value)[:100]
    return unusable(
        f"the model's {key} is missing or invalid",
        where,
        found,
        "use the config.json of a Hugging Face model with the same dimensions",
    )
