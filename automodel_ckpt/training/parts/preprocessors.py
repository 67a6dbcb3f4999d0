"""Where a recipe's tokenizer or processor is read from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.repository import (
    check_revision,
    reject_other_weights,
    require_local,
)
from automodel_ckpt.training.model.sections import preprocessor_options

_BASE = "model.from_pretrained"
_VOCABULARY = (
    r"^(tokenizer\.json|tekken\.json|(vocab|bpe|merges)\b.*)$|\.(model|tiktoken|spm|vocab|bpe)$"
)
"""The names of files with the vocabulary of a tokenizer, by any of the libraries that transformers reads."""
_NUM_SHOWN = 8


def find_preprocessor(
    config: RecipeConfig, key: Literal["tokenizer", "processor"]
) -> tuple[str | None, str]:
    """(directory or Hub name, dotted key that gives it) of the section *key*, else of the pretrained model.

    The name is None if neither gives one. Raises :class:`RecipeError` for a path that does not exist, and
    :class:`CheckpointUnusable` for an export whose files are damaged.
    """
    name, where = getattr(config, key).from_pretrained, f"{key}.from_pretrained"
    if name is None and isinstance(config.model, ModelConfig):
        name, where = config.model.from_pretrained, _BASE
    if name is not None:
        require_local(name, where)
        revision = preprocessor_options(config, name, where).revision
        if where != _BASE:
            check_revision(name, revision, f"{key}.revision", where)
        from automodel_ckpt.training.parts.init_from import verify_side_files

        verify_side_files(name, config.checkpoint.verify, revision)
    return name, where


def check_vocabulary_file(preprocessor: Any, where: str) -> Any:
    """Return *preprocessor*, a tokenizer or processor that the key *where* gives.

    Raises :class:`RecipeError` if it was read from a directory without a vocabulary: transformers returns a tokenizer
    without tokens then. Tokenizers of bytes have no such file.
    """
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    names = (getattr(tokenizer, "vocab_files_names", None) or {}).values()
    directory = Path(getattr(tokenizer, "name_or_path", None) or "")
    has_one = not names or any((directory / str(name)).exists() for name in names)
    absent = None if has_one else absent_tokenizer(str(directory), where)
    if absent is not None:
        raise absent
    return preprocessor


def absent_tokenizer(name: str, where: str) -> RecipeError | None:
    """Return the error to raise if the directory *name*, which the key *where* gives, lacks a tokenizer's vocabulary.

    None for a Hub name, and for a directory that has one: the library's own error describes what is wrong with it.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        return None
    files = sorted(path.name for path in directory.iterdir())
    if any(re.search(_VOCABULARY, file) for file in files):
        return None
    listed = ", ".join(files[:_NUM_SHOWN])
    more = ", ..." if len(files) > _NUM_SHOWN else ""
    if where == _BASE:
        reject_other_weights(name, where)
    if where == _BASE and "config.json" not in files:
        return RecipeError(
            "the directory has no model",
            where=where,
            value=f"{name} has {listed or 'no files'}{more}",
            hint="name the directory with config.json and the weights",
        )
    return RecipeError(
        "the directory has no tokenizer",
        where=where,
        value=f"{name} has {listed or 'no files'}{more}",
        hint="copy the tokenizer's files of the original model there; or set tokenizer.from_pretrained (for images: "
        "processor.from_pretrained) to a directory with tokenizer.json, or to a Hub name; for data that is tokenized "
        "already: tokenizer: null",
    )
