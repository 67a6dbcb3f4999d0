"""The model that most tests train. Imports nothing, so that tools can use it before torch is imported."""

from tests.support.models.sizes import model_sizes


def tiny_llama(**more: object) -> str:
    """The section ``model`` of a recipe: a Llama of 2 layers of width 32, with *more* fields of its configuration."""
    fields = {
        "model_type": "llama",
        **model_sizes(hidden=32, inner=48, layers=2, heads=4, kv_heads=2, positions=32),
        "initializer_range": 0.3,
        **more,
    }
    lines = [f"    {name}: {_yaml(value)}\n" for name, value in fields.items()]
    return "model:\n  from_config:\n" + "".join(lines)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
