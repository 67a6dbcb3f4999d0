"""Which files belong beside the weights of a Hugging Face model: config, tokenizer, code, license, pooling."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
)
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


_SIDE_FILES = (
    "config.json",
    GENERATION_CONFIG,
    *MODEL_FILES,
    *TOKENIZER_FILES,
    *EMBEDDING_FILES,
)
_FOLDERS = ("additional_chat_templates/*", "[0-9]_*/config.json")


def base_files(directory: Path) -> dict[str, bytes]:
    """The files of a pretrained model that belong beside its weights: config, tokenizer or processor, code, license."""
    return read_files(directory, _SIDE_FILES)


def is_side_file(name: str) -> bool:
    """Whether :func:`base_files` would take a file of that name."""
    return any(fnmatch(name, pattern) for pattern in _SIDE_FILES)


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of that name, relative to the model's directory, is a tokenizer's or a processor's."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def is_embedding_file(name: str) -> bool:
    """Whether a file of that name, relative to the model's directory, describes how embeddings are computed."""
    return any(fnmatch(name, pattern) for pattern in EMBEDDING_FILES)


def read_files(directory: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """The files at the top of *directory*, or in a folder that a pattern names, whose relative name fits a pattern."""
    wanted = tuple(patterns)
    candidates = list(directory.glob("*"))
    for folder in _FOLDERS:
        candidates += directory.glob(folder)
    # Links are followed: in the Hub's cache, every file is a link.
    files: dict[str, bytes] = {}
    for path in sorted(candidates):
        name = path.relative_to(directory).as_posix()
        is_wanted = any(fnmatch(name, pattern) for pattern in wanted)
        if is_wanted and path.is_file():
            files[name] = path.read_bytes()
    return files
