"""The directory of a pretrained model: a path, or files of the Hugging Face Hub in the cache."""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from automodel_ckpt.base.other_weights import weights_of_another_program
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_model_file
from automodel_ckpt.checkpoint.sources.model_files import check_directory
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.config_checks import check_sizes
from automodel_ckpt.models.inspect.repository import base_directory

_OF_URL = (
    "download it with the tools of its store; for the weights alone, init_from.path accepts its URL"
)


def require_local(name: str, where: str) -> None:
    """Raise :class:`RecipeError` if *name* looks like a path, not like a name of the Hub, and does not exist.

    Also for a directory with files that may not be read, or that are links to files elsewhere, which a library would
    follow.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        check_directory(path)
        # Reading the tokenizer already creates the model's configuration.
        with suppress(OSError, ValueError, AttributeError):
            settings = parse_json(read_model_file(path, "config.json"))
            check_sizes(settings, f"config.json of {name}")
    if path.exists():
        return
    looks_local = name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    if looks_local or ("/" in name and path.parent.is_dir()):
        hint = _OF_URL if "://" in name else _nearest_directory(path)
        raise RecipeError("no such directory", where=where, value=name, hint=hint)


def reject_other_weights(name: str, where: str) -> None:
    """Raise :class:`RecipeError` if the directory *name* has only weights of a program that this one does not read."""
    found = weights_of_another_program(Path(name).expanduser())
    if found is not None:
        what, hint = found
        raise RecipeError(
            f"the directory has {what}, which cannot be trained", where=where, value=name, hint=hint
        )


def _nearest_directory(path: Path) -> str:
    siblings = []
    if path.parent.is_dir():
        siblings = [sibling.name for sibling in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / near[0]}? " if near else ""
    return f"{hint}use a directory with a config.json, or a model of the Hugging Face Hub"


def fetched_directory(name: str, revision: str | None = None) -> Path | None:
    """Fetch the weights of a Hub name into the cache, if necessary, and return their local directory.

    *revision* is a branch, tag or commit of a Hub name; None: the main branch. Returns None if they are not
    available as safetensors. If several ranks of a node fetch, they wait for each other.
    """
    if Path(name).expanduser().is_dir():
        return base_directory(name, revision)
    try:
        # If the files are not in the cache, they cannot be read in parts, and each rank would build
        # the complete model.
        index = _fetched(name, SAFE_WEIGHTS_INDEX_NAME, revision)
        if index is not None:
            get_files: Any = get_checkpoint_shard_files
            get_files(name, index, revision=revision)
        elif _fetched(name, SAFE_WEIGHTS_NAME, revision) is None:
            return None
    except (OSError, ValueError):
        return None
    return base_directory(name, revision)


def _fetched(name: str, file: str, revision: str | None) -> str | None:
    """The path of a *file* of a Hub name in the cache, fetched if necessary; None if the model has no such file."""
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
