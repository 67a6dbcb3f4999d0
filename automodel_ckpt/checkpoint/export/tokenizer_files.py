"""The files of a tokenizer or processor in an export: the bytes that it was read from, where it is unchanged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files
from automodel_ckpt.checkpoint.sources.model_files import (
    TOKENIZER_FILES,
    read_files,
    save_preprocessor,
)

_TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_files(tokenizer: Any, base_dir: Path | str | None) -> FileDict:
    """The files of a *tokenizer* or processor: its own bytes where it was read from files and is unchanged.

    It was read from the directory that it names itself, or *base_dir*. None has no files.
    """
    if tokenizer is None:
        return {}
    name = getattr(_tokenizer_of(tokenizer), "name_or_path", "")
    origin = name if name and Path(name).is_dir() else base_dir
    files = {} if origin is None else read_files(Path(origin), _files_of(tokenizer))
    before = _read_unchanged(tokenizer, Path(origin)) if origin is not None and files else None
    if before is not None:
        if before.chat_template == tokenizer.chat_template:
            return files
        if isinstance(tokenizer.chat_template, str):
            return _with_template(files, tokenizer.chat_template)
    with tempfile.TemporaryDirectory(prefix="automodel_ckpt-") as directory:
        save_preprocessor(tokenizer, Path(directory))
        return read_files(Path(directory), ("*", "additional_chat_templates/*"))


def _read_unchanged(tokenizer: Any, directory: Path) -> Any:
    """Read the tokenizer or processor in *directory*, if it has the vocabulary and the settings of *tokenizer*.

    Returns None when it differs. It may have another chat template, a text.
    """
    inner = _tokenizer_of(tokenizer)
    try:
        read = type(inner).from_pretrained(directory)
        # A classifier's tokenizer can have got a pad token.
        is_same = read.get_vocab() == inner.get_vocab() and read.pad_token == inner.pad_token
        if inner is not tokenizer:
            is_same = is_same and read.chat_template == inner.chat_template
            read = type(tokenizer).from_pretrained(directory)
            is_same = is_same and read.to_dict() == tokenizer.to_dict()
    except (OSError, ValueError, AttributeError, TypeError, ImportError):
        # The files of another class, or damaged ones: the tokenizer is saved anew.
        return None
    return read if is_same else None


def _with_template(files: Files, template: str) -> FileDict:
    """Return the *files* of a tokenizer with another chat template, in all places that programs read it from."""
    changed = {name: content for name, content in files.items() if "chat_template" not in name}
    changed["chat_template.jinja"] = template.encode()
    if _TOKENIZER_CONFIG in changed:
        settings = json.loads(changed[_TOKENIZER_CONFIG])
        if settings.pop("chat_template", None) is not None:
            changed[_TOKENIZER_CONFIG] = json.dumps(settings, indent=1).encode() + b"\n"
    return changed


def _tokenizer_of(tokenizer: Any) -> Any:
    """A processor's tokenizer, or the tokenizer itself."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def _files_of(tokenizer: Any) -> tuple[str, ...]:
    """The names of a tokenizer's or processor's files, also of a class that transformers does not have."""
    stated: list[Any] = []
    for attribute in ("vocab_files_names", "resource_files_names"):
        stated += (getattr(_tokenizer_of(tokenizer), attribute, None) or {}).values()
    return (*TOKENIZER_FILES, *(name for name in stated if isinstance(name, str)))
