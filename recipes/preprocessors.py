"""Where a recipe's tokenizer or processor is read from."""

from __future__ import annotations

from typing import Literal

from automodel_ckpt.config.schema import ModelConfig, RecipeConfig
from automodel_ckpt.hub_access import is_hub_name, resolve_commit
from automodel_ckpt.models.build import require_local
from automodel_ckpt.recipes.init_from import verify_side_files
from automodel_ckpt.recipes.repository import preprocessor_options

_BASE = "model.from_pretrained"


def find_preprocessor(
    config: RecipeConfig, key: Literal["tokenizer", "processor"]
) -> tuple[str | None, str]:
    """(directory or Hub name, dotted key that gives it) of the section *key*, else of the pretrained model.

    The name is None if neither gives one. Raises :class:`RecipeError` for a path that does not exist or a name of the
    Hub that cannot be read, and :class:`CheckpointUnusable` for an export whose files are damaged.
    """
    name, where = getattr(config, key).from_pretrained, f"{key}.from_pretrained"
    if name is None and isinstance(config.model, ModelConfig):
        name, where = config.model.from_pretrained, _BASE
    if name is not None:
        require_local(name, where)
        if where != _BASE and is_hub_name(name):
            # The base was checked already. The library would repeat requests before it reports the same.
            resolve_commit(name, where=where)
        revision = preprocessor_options(config, name).revision
        verify_side_files(name, config.checkpoint.verify, revision)
    return name, where
