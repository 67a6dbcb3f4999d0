"""Which files belong beside the weights of a Hugging Face model: config, tokenizer, code, license, pooling."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.safe_open import OUTSIDE, model_file, read_model_file
from automodel_ckpt.checkpoint.files.type_aliases import FileDict
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

_SIDE_FILES = (
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
    """The files of a pretrained model that belong beside its weights: config, tokenizer or processor, code, license."""
    return read_files(directory, _SIDE_FILES)


def is_side_file(name: str) -> bool:
    """Whether :func:`base_files` would take a file of that name."""
    return _fits(name, _SIDE_FILES)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    # A * also matches a slash: without this check, deeper files would match, too.
    return any(
        fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns
    )


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of that name, relative to the model's directory, is a tokenizer's or a processor's."""
    return _fits(name, TOKENIZER_FILES)


def is_embedding_file(name: str) -> bool:
    """Whether a file of that name, relative to the model's directory, describes how embeddings are computed."""
    return _fits(name, EMBEDDING_FILES)


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
        for name in _matching(directory, _SIDE_FILES):
            model_file(directory, name)
        for name in (".", *_matching(directory, (*_SIDE_FILES, *_WEIGHTS))):
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
