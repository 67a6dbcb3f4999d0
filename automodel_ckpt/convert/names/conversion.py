"""Convert weights of any format from Megatron's names to the names of a Hugging Face model. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.slices import TensorDict, TensorMap
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
from automodel_ckpt.errors import unusable

_CONFIG = "config.json"
# What some versions of torchtitan save, and compute from the config.
_COMPUTED = ("freqs_cis", "rope.freqs", "rope.cache")
# Tensors that every GPT model of Megatron-Core has, on one of its pipeline stages.
_MARKS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
HINT = "add --config DIR, a directory with the config.json of the same model"


@dataclass(frozen=True)
class Conversion:
    """The converter and the dimensions of a model, which *where* states.

    *renamed* returns weights of another program, found in a path, under the names of the converter.
    """

    converter: Converter
    dimensions: Dimensions
    where: str
    renamed: Callable[[TensorMap, str], TensorDict] = plain_names

    def source(self, source: Source) -> Source:
        """Return *source* with the tensors of the Hugging Face model.

        Raises :class:`CheckpointUnusable` if its tensors do not match the model.
        """
        where = str(source.model_directory)
        weights = {
            name: tensor
            for name, tensor in source.tensors.items()
            if is_model_tensor(name) and name not in _COMPUTED
        }
        renamed = self.renamed(weights, where)
        converted = self.converter.to_hugging_face(renamed, self.dimensions, where)
        num_ignored = len(source.tensors) - len(weights)
        omitted = source.omitted
        if num_ignored:
            computed = f"{counted(num_ignored, 'tensor')} that the other program computes"
            omitted = (*omitted, computed)
        return replace(source, tensors=converted, tied={}, omitted=omitted)


def conversion_in(directory: Path) -> Conversion | None:
    """Return the conversion that ``config.json`` in *directory* implies.

    Returns None when there is no such file. Raises :class:`CheckpointUnusable` if the config is
    damaged, or no converter knows its type of model.
    """
    config = read_json(directory, _CONFIG)
    if config is None:
        return None
    where = str(directory / _CONFIG)
    converter = converter_of(config.get("model_type"), where)
    return Conversion(converter, dimensions_of_config(config, where), where)


def required_conversion(found: Conversion | None, directory: Path) -> Conversion:
    """Return the conversion *found* in *directory*. Raises :class:`CheckpointUnusable` if there is none."""
    if found is None:
        raise unusable(
            "there is no config.json of a model that these names can be converted to",
            directory,
            "no such file, or another model_type",
            "use a directory with the model's config.json, for example a download from the Hub; or let torchtitan save "
            "Hugging Face files (last_save_in_hf)",
        )
    return found


def has_megatron_names(tensors: TensorMap) -> bool:
    """Return whether *tensors* have the names of a GPT model of Megatron-Core."""
    # Exactly these: other models have, for example, transformer.embedding.word_embeddings.weight.
    return any(without_prefix(name) in _MARKS for name in tensors)


def check_converted(tensors: TensorMap, where: str) -> None:
    """Raise :class:`CheckpointUnusable` if *tensors* still have Megatron's names, which no recipe can use."""
    if has_megatron_names(tensors):
        raise unusable(
            "these weights have Megatron's names, and the model that they are for is not stated here",
            where,
            next(name for name in tensors if without_prefix(name) in _MARKS),
            HINT,
        )
