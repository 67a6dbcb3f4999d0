"""The model that most tests train. Imports nothing, so that tools can use it before torch is imported."""

from __future__ import annotations


def tiny_llama(**more: object) -> str:
    """The section ``model`` of a recipe: a Llama of 2 layers of width 32, with *more* fields of its configuration."""
    fields = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        **more,
    }
    lines = [f"    {name}: {_yaml(value)}\n" for name, value in fields.items()]
    return "model:\n  from_config:\n" + "".join(lines)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
