"""Builders for pretraining data that other programs tokenized: Megatron's indexed data sets and nanoGPT's files."""

from __future__ import annotations

import glob
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.arguments import at_most
from automodel_ckpt.data.files import is_pattern
from automodel_ckpt.data.megatron_tokens import MegatronIndex, read_index
from automodel_ckpt.data.nanogpt_tokens import raw_tokens, read_header
from automodel_ckpt.data.token_arrays import TokenArray, TokenWindows
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.units import counted

log = logging.getLogger(__name__)

_PARTS = ("train", "validation", "test")


def megatron(
    path: str | list[str],
    seq_length: int = 1024,
    split: str = "100, 0, 0",
    part: Literal["train", "validation", "test"] = "train",
    max_samples: int | None = None,
    vocab_size: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TokenWindows:
    """Read Megatron's indexed data sets: make samples of *seq_length* tokens, with labels on all of them.

    *path* is the prefix of a ``.bin`` and an ``.idx`` file, a pattern of them, or a list. The documents of a file are
    concatenated in its order. *split* are the shares of the documents that train, validation and test get, such as
    ``969, 30, 1``; *part* selects one. Tokens must be below *vocab_size*, by default the size of the tokenizer if there
    is one (``tokenizer: null`` for none).

    The files are validated and memory-mapped; :class:`~automodel_ckpt.data.token_arrays.TokenWindows` describes the
    samples. A sample contains that of Megatron with the sequence length *seq_length* - 1, its labels included. For
    several files with weights, use :func:`~automodel_ckpt.data.mixture.mixture`. Raises :class:`RecipeError` for
    invalid files.
    """
    prefixes = _paths(path, (".idx",))
    shares = _shares(split)
    arrays = []
    for prefix in prefixes:
        index = read_index(prefix)
        arrays.append(_part_of(index, shares, part))
    return _windows(arrays, path, seq_length, vocab_size, tokenizer, None, max_samples)


def nanogpt(
    path: str | list[str],
    seq_length: int = 1024,
    header: bool = True,
    dtype: Literal["uint16", "uint32"] = "uint16",
    bos_token: int | None = None,
    max_samples: int | None = None,
    vocab_size: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TokenWindows:
    """Read nanoGPT's ``.bin`` files: make samples of *seq_length* tokens, with labels on all of them.

    *path* is a file, a pattern of files or a list. With *header* they have the header of modded-nanogpt and llm.c;
    without, they are raw tokens of type *dtype*. With *bos_token*, each sample begins at that token, for which the
    files are read once at the start. Tokens must be below *vocab_size*, by default the size of the tokenizer if there
    is one (``tokenizer: null`` for none).

    The files are memory-mapped; :class:`~automodel_ckpt.data.token_arrays.TokenWindows` describes the samples. Raises
    :class:`RecipeError` for invalid files.
    """
    num_bytes = {"uint16": 2, "uint32": 4}[dtype]
    read: Callable[[Path], TokenArray] = read_header
    if not header:

        def read(file: Path) -> TokenArray:
            return raw_tokens(file, num_bytes)

    arrays = [read(file) for file in _paths(path, ())]
    return _windows(arrays, path, seq_length, vocab_size, tokenizer, bos_token, max_samples)


def _windows(
    arrays: Sequence[TokenArray],
    path: str | list[str],
    seq_length: int,
    vocab_size: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    start_token: int | None,
    max_samples: int | None,
) -> TokenWindows:
    if seq_length < 2:
        hint = "give at least 2 (a token and the one it predicts)"
        raise RecipeError(
            "seq_length is too small", where="dataset.seq_length", value=seq_length, hint=hint
        )
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    limit = None if max_samples is None else at_most(max_samples, max_samples)
    windows = TokenWindows(
        arrays, seq_length, vocab_size=vocab_size, start_token=start_token, max_samples=limit
    )
    num_tokens = sum(array.count for array in arrays)
    if not len(windows):
        raise RecipeError(
            "the files have no sample of seq_length tokens",
            where="dataset.path",
            value=f"{num_tokens} tokens in {len(arrays)} files, seq_length {seq_length}",
            hint="give a smaller seq_length or other files; with split, check the share of this part",
        )
    log.info(
        "%s: %s of %s, from %s in %s",
        path,
        counted(len(windows), "sample"),
        counted(seq_length, "token"),
        counted(num_tokens, "token"),
        counted(len(arrays), "file"),
    )
    return windows


def _paths(path: str | Sequence[str], suffixes: tuple[str, ...]) -> list[Path]:
    """List the files that *path* selects; with *suffixes*, their names without ``.bin`` and these suffixes."""
    given = [path] if isinstance(path, str) else list(path)
    found: dict[Path, None] = {}
    for each in given:
        text = os.path.expanduser(each)
        matches = [text]
        if is_pattern(text):
            matches = _matches(text, suffixes)
        for match in matches:
            found[_without_suffix(Path(match), suffixes)] = None
    if not found:
        raise RecipeError(
            "no file of tokens is found",
            where="dataset.path",
            value=", ".join(map(str, given)),
            hint=f"give an existing file; relative paths start at {Path.cwd()}",
        )
    return list(found)


def _matches(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    """List the files that match a pattern, or with *suffixes* the pattern with one of them, by name."""
    if not suffixes:
        return sorted(glob.glob(pattern))
    matches = glob.glob(pattern)
    for suffix in suffixes:
        matches += glob.glob(pattern + suffix)
    return sorted(match for match in matches if match.endswith(suffixes))


def _without_suffix(path: Path, suffixes: tuple[str, ...]) -> Path:
    if suffixes and path.suffix in (*suffixes, ".bin"):
        return path.with_suffix("")
    return path


def _shares(split: str) -> list[float]:
    """Parse the shares of train, validation and test, which may be percentages or fractions."""
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    is_valid = 1 <= len(shares) <= 3 and all(0 <= share < math.inf for share in shares)
    if not is_valid or sum(shares) <= 0:
        raise RecipeError(
            "the split is not a list of shares",
            where="dataset.split",
            value=split,
            hint='give up to three numbers for train, validation and test, such as "99, 1, 0"',
        )
    shares += [0.0] * (3 - len(shares))
    return [share / sum(shares) for share in shares]


def _part_of(index: MegatronIndex, shares: Sequence[float], part: str) -> TokenArray:
    """Return the tokens of the documents that a part gets, with Megatron's rounding of their numbers."""
    number = _PARTS.index(part)
    first = round(sum(shares[:number]) * index.num_documents)
    last = round(sum(shares[: number + 1]) * index.num_documents)
    return index.tokens(first, last)
