"""The files next to the weights of a Hugging Face model: config, tokenizer, code, license, pooling. Imports no torch.

A tokenizer keeps the bytes of the files that it was read from, where it is unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.safe_open import OUTSIDE, model_file, read_model_file
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files
from automodel_ckpt.errors import (
    NOT_ALLOWED,
    PERMISSIONS_HINT,
    TAKE_ANOTHER,
    CheckpointUnusable,
    Problem,
    RecipeError,
    os_problem,
)

MAX_SIDE_BYTES = 128 << 20
"""Tokenizers of large vocabularies take some ten megabytes."""

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.spm",
    "target_vocab.json",
    "bpe.codes",
    "dict.txt",
    "byte_maps.json",
    "emoji.json",
    "entity_vocab.json",
    "normalizer.json",
    "*.tokenizer",
    "word_*.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
)
"""The files of processors and of all tokenizers of transformers, by the names that their classes state."""
EMBEDDING_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
)
"""The files with which sentence-transformers computes embeddings."""
CODE_FILES = ("*.py",)
MODEL_FILES = (*CODE_FILES, "LICENSE*", "NOTICE*", "USE_POLICY*")
GENERATION_CONFIG = "generation_config.json"
QUANTIZATION_FILES = {"quantize_config.json": "GPTQ or AWQ", "quant_config.json": "AWQ"}
"""File with the settings of quantized weights that config.json does not name -> the method that wrote it."""
ADAPTER_SIDE_FILES = (*TOKENIZER_FILES, GENERATION_CONFIG)
"""The files next to an adapter that its merged model gets."""
_TOKENIZER_CONFIG = "tokenizer_config.json"

SIDE_FILES = (
    "config.json",
    GENERATION_CONFIG,
    *MODEL_FILES,
    *TOKENIZER_FILES,
    *EMBEDDING_FILES,
    *QUANTIZATION_FILES,
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
_FOLDERS = ("additional_chat_templates/*", "[0-9]_*/config.json")


def base_files(directory: Path) -> FileDict:
    """A pretrained model's files that belong next to its weights: config, tokenizer or processor, code, license."""
    return read_files(directory, SIDE_FILES)


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether *name*, relative to the model's directory, matches one of *patterns*, such as :data:`TOKENIZER_FILES`."""
    # A * also matches a slash: without this check, deeper files would match, too.
    return any(
        fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns
    )


def save_preprocessor(preprocessor: Any, directory: Path) -> None:
    """Save a tokenizer or processor in *directory*, so that transformers 4 also loads it.

    transformers 5 writes the name of a class that version 4 does not have, and a list where that expects a mapping. Its
    own version 5 reads the older spelling with the same result.
    """
    preprocessor.save_pretrained(directory)
    path = directory / _TOKENIZER_CONFIG
    if not path.is_file():
        return
    settings = json.loads(path.read_bytes())
    if settings.get("tokenizer_class") != "TokenizersBackend":
        return
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_files(directory: Path, patterns: Iterable[str]) -> FileDict:
    """The files at the top of *directory*, or in a folder that a pattern names, if their relative name fits a pattern.

    Raises :class:`CheckpointUnusable` for a file that cannot be read, and for a link that
    :func:`~automodel_ckpt.checkpoint.files.safe_open.model_file` does not follow.
    """
    files = {}
    for name in _matching(directory, patterns):
        try:
            files[name] = read_model_file(directory, name, limit=MAX_SIDE_BYTES)
        except OSError as error:
            raise CheckpointUnusable.all_of([unreadable(error)]) from error
    return files


def check_directory(directory: Path) -> None:
    """Check the files of a model before a library reads them.

    Raises :class:`RecipeError` for a link that :func:`read_files` would not follow, and for a file that this user may
    not read, which libraries report as missing.
    """
    try:
        for name in _matching(directory, SIDE_FILES):
            model_file(directory, name)
        for name in (".", *_matching(directory, (*SIDE_FILES, *_WEIGHTS))):
            if not os.access(directory / name, os.R_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory / name)
    except OSError as error:
        raise RecipeError.all_of([unreadable(error)]) from error


def unreadable(error: OSError) -> Problem:
    """Return the problem of a side file that cannot be read."""
    path = str(error.filename)
    if error.errno == errno.ELOOP and os.path.islink(path):
        hint = (
            "replace the link by a copy of its target, if that belongs to the model; else remove it"
        )
        return Problem(OUTSIDE, path, os.readlink(path), hint)
    hint = PERMISSIONS_HINT if error.errno in NOT_ALLOWED else TAKE_ANOTHER
    return os_problem(error, "a file of the model cannot be read", hint=hint)


def _matching(directory: Path, patterns: Iterable[str]) -> list[str]:
    """The sorted relative names of the files at the top of *directory* or in known folders that fit a pattern."""
    wanted = tuple(patterns)
    candidates = []
    # Not glob(): a directory that cannot be read is not an empty one.
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(directory) as entries,
    ):
        candidates = [Path(entry.path) for entry in entries]
    for folder in _FOLDERS:
        candidates += directory.glob(folder)
    names = []
    for path in sorted(candidates):
        name = path.relative_to(directory).as_posix()
        if any(fnmatch(name, pattern) for pattern in wanted) and path.is_file():
            names.append(name)
    return names


# ---------------------------------------------------------------- a tokenizer in memory


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
