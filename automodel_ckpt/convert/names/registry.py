"""The converters, by model type. A new converter is a module of this package and an entry in CONVERTERS."""

from __future__ import annotations

from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.llama import LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from automodel_ckpt.errors import unusable

CONVERTERS: tuple[Converter, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL)


def model_types() -> list[str]:
    """Return the model types that have a converter, sorted."""
    return sorted(name for converter in CONVERTERS for name in converter.model_types)


def converter_of(model_type: object, where: str) -> Converter:
    """Return the converter for a ``model_type`` of config.json, which was found in *where*.

    Raises :class:`CheckpointUnusable` if there is none.
    """
    for converter in CONVERTERS:
        if model_type in converter.model_types:
            return converter
    raise unusable(
        "there is no converter for this type of model",
        where,
        str(model_type)[:100],
        f"models of these types can be converted: {', '.join(model_types())}",
    )
