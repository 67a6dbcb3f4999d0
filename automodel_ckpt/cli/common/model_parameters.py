"""The names of a model's tensors for commands that import them; torch is imported when they are needed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from automodel_ckpt.convert.formats.format import ModelParameter, Parameters
    from automodel_ckpt.convert.merging.model_names import NameDifferences

_SCIPY = "scipy"


def parameters_in(directory: Path) -> Parameters:
    """Return a function that lists the parameters of the model with the config.json in *directory*.

    The function imports torch and transformers, and builds the model on the meta device. It raises
    :class:`CheckpointUnusable` if config.json is missing, or its class is not part of transformers.
    """

    def parameters() -> list[ModelParameter]:
        from automodel_ckpt.convert.formats.format import ModelParameter

        with _without_scipy():
            from automodel_ckpt.models.inspect.signature import list_parameters

            return [ModelParameter(*listed) for listed in list_parameters(directory)]

    return parameters


def compare_names(config: bytes, names: Collection[str]) -> NameDifferences | None:
    """Compare *names* with the names in the model that *config* describes, the content of its config.json.

    The model is built on the meta device, by torch and transformers. Its shapes are returned, too. Returns None when
    the names of the model are unknown.
    """
    from automodel_ckpt.checkpoint.files.bounded_json import parse_json
    from automodel_ckpt.convert.merging.model_names import NameDifferences

    try:
        content = parse_json(config)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    with _without_scipy():
        from automodel_ckpt.models.inspect.model_names import list_differences

        found = list_differences(content, names)
    return None if found is None else NameDifferences(*found)


@contextlib.contextmanager
def _without_scipy() -> Iterator[None]:
    """During the block, make scipy appear not to be installed, unless it or transformers is imported already.

    transformers imports it for the losses of object detection: 22 of the 300 MB that an import may take.
    """
    # transformers remembers that scipy is there, and then fails if it is not.
    is_hidden = not {_SCIPY, "transformers"} & sys.modules.keys()
    if is_hidden:
        # What Python does for a module that must not be imported (importlib.util.find_spec).
        sys.modules[_SCIPY] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[_SCIPY]
