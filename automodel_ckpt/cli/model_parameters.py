"""The parameters of a model for commands that name numbered optimizer state; torch is imported when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from automodel_ckpt.convert.training_state import ModelParameter, Parameters


def parameters_in(directory: Path) -> Parameters:
    """Return a function that lists the parameters of the model whose config.json is in *directory*.

    The function imports torch and transformers, and builds the model on the meta device. It raises
    :class:`CheckpointUnusable` if config.json is missing, or its class is not part of transformers.
    """

    def parameters() -> list[ModelParameter]:
        from automodel_ckpt.convert.training_state import ModelParameter
        from automodel_ckpt.models.parameter_list import list_parameters

        return [ModelParameter(*listed) for listed in list_parameters(directory)]

    return parameters
