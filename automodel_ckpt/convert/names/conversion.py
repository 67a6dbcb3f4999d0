"""Convert the weights that any format found from Megatron's names to those of a Hugging Face config. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.dimensions import Dimensions, dimensions_of_config
from automodel_ckpt.convert.names.megatron_names import (
    is_model_tensor,
    plain_names,
    without_prefix,
)
from automodel_ckpt.convert.names.registry import converter_of
from automodel_ckpt.errors import CheckpointUnusable

_CONFIG = "config.json"
# Tensors that every GPT model of Megatron-Core has, on one of its pipeline stages.
_MARKS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
HINT = "add --config DIR, a directory with the config.json of the same model"


Weights = Callable[[Mapping[str, Tensor], str], dict[str, Tensor]]
"""Returns a program's weights under the names of a converter, for its tensors in a path."""


def _megatron_weights(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    return plain_names({name: tensors[name] for name in tensors if is_model_tensor(name)}, where)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The converter and the dimensions of a model, which *where* states.

    *weights* selects and renames the tensors of another program; *is_weight* is whether a name is one of those.
    """

    converter: Converter
    dimensions: Dimensions
    where: str
    weights: Weights = _megatron_weights
    is_weight: Callable[[str], bool] = is_model_tensor

    def source(self, source: Source) -> Source:
        """Return *source* with the tensors of the Hugging Face model.

        Raises :class:`CheckpointUnusable` if its tensors are not those of the model.
        """
        where = str(source.model_directory)
        weights = self.weights(source.tensors, where)
        converted = self.converter.to_hugging_face(weights, self.dimensions, where)
        num_ignored = sum(1 for name in source.tensors if not self.is_weight(name))
        omitted = source.omitted
        if num_ignored:
            computed = f"{counted(num_ignored, 'tensor')} that the other program computes"
            omitted = (*omitted, computed)
        return replace(source, tensors=converted, tied={}, omitted=omitted)


def conversion_in(directory: Path) -> Conversion | None:
    """Return the conversion that ``config.json`` in *directory* implies; None if there is no such file.

    Raises :class:`CheckpointUnusable` if the config is damaged, or no converter knows its type of model.
    """
    config = read_json(directory, _CONFIG)
    if config is None:
        return None
    where = str(directory / _CONFIG)
    converter = converter_of(config.get("model_type"), where)
    return Conversion(converter, dimensions_of_config(config, where), where)


def required_conversion(directory: Path) -> Conversion:
    """Return the conversion that ``config.json`` in *directory* implies. Raises :class:`CheckpointUnusable`."""
    conversion = conversion_in(directory)
    if conversion is None:
        raise unusable(
            "there is no config.json of a Hugging Face model",
            directory,
            "no such file" if directory.is_dir() else "no such directory",
            "use a directory with the model's config.json, for example a download from the Hub",
        )
    return conversion


def has_megatron_names(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether *tensors* have the names of a GPT model of Megatron-Core."""
    # Exactly these: other models have, for example, transformer.embedding.word_embeddings.weight.
    return any(without_prefix(name) in _MARKS for name in tensors)


def check_converted(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise :class:`CheckpointUnusable` if *tensors* still have Megatron's names, which no recipe can use."""
    if has_megatron_names(tensors):
        raise CheckpointUnusable(
            "these weights have Megatron's names, and the model that they are for is not stated here",
            where=where,
            value=next(name for name in tensors if without_prefix(name) in _MARKS),
            hint=HINT,
        )
