"""Convert the weights that any format found from Megatron's names to those of a Hugging Face config. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Source
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


@dataclass(frozen=True, slots=True)
class Conversion:
    """The converter and the dimensions of a model, which *where* states."""

    converter: Converter
    dimensions: Dimensions
    where: str

    def tensors(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """Return Megatron's *tensors*, found in *where*, as those of the Hugging Face model.

        Raises :class:`CheckpointUnusable` if they are not those of the model.
        """
        weights = {name: tensor for name, tensor in tensors.items() if is_model_tensor(name)}
        plain = plain_names(weights, where)
        return self.converter.to_hugging_face(plain, self.dimensions, where)

    def source(self, source: Source) -> Source:
        """Return *source* with the tensors of the Hugging Face model. Raises :class:`CheckpointUnusable`."""
        converted = self.tensors(source.tensors, str(source.model_directory))
        num_ignored = sum(1 for name in source.tensors if not is_model_tensor(name))
        omitted = source.omitted
        if num_ignored:
            omitted = (*omitted, f"{counted(num_ignored, 'tensor')} that Megatron computes")
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
        raise CheckpointUnusable(
            "there is no config.json of a Hugging Face model",
            where=str(directory),
            value="no such file" if directory.is_dir() else "no such directory",
            hint="use a directory with the model's config.json, for example a download from the Hub",
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
