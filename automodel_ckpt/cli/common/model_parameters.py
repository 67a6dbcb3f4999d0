"""The names of a model's tensors for commands that import them; torch is imported when they are needed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from automodel_ckpt.convert.formats.format import ModelParameter, Parameters
    from automodel_ckpt.convert.merging.model_names import NameDifferences


def parameters_in(directory: Path) -> Parameters:
    """Return a function that lists the parameters of the model with the config.json in *directory*.

    The function imports torch and transformers, and builds the model on the meta device. It raises
    :class:`CheckpointUnusable` if config.json is missing, or its class is not part of transformers.
    """

    def parameters() -> list[ModelParameter]:
        from automodel_ckpt.convert.formats.format import ModelParameter
        from automodel_ckpt.models.inspect.signature import list_parameters

        return [ModelParameter(*listed) for listed in list_parameters(directory)]

    return parameters


def compare_names(config: bytes, names: Collection[str]) -> NameDifferences | None:
    """Compare *names* with the names in the model that *config* describes, the content of its config.json.

    The model is built on the meta device, by torch and transformers. Its shapes are returned, too. Returns None when
    the names of the model are unknown.
    """
    from automodel_ckpt.checkpoint.files.safe_open import parse_json
    from automodel_ckpt.convert.merging.model_names import NameDifferences

    try:
        content = parse_json(config)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    from automodel_ckpt.models.inspect.model_names import list_differences

    found = list_differences(content, names)
    return None if found is None else NameDifferences(*found)
