"""Builders for pretraining data that other programs tokenized: Megatron's indexed data sets and nanoGPT's files."""

from __future__ import annotations

import glob
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.collate import Integers, require_choice, require_range
from automodel_ckpt.data.rows.files import is_pattern
from automodel_ckpt.data.samples.token_arrays import (
    TokenArray,
    TokenSpans,
    documents_of,
    identity_of,
    raw_tokens,
    read_header,
    read_index,
    windows_of,
)
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_PARTS = ("train", "validation", "test")


def megatron(
    path: str | list[str],
    seq_length: int | None = 1024,
    split: str = "100, 0, 0",
    part: Literal["train", "validation", "test"] = "train",
    max_samples: int | None = None,
    vocab_size: int | None = None,
    documents: bool = False,
    truncation: Literal["error", "right"] = "error",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TokenSpans:
    """Read Megatron's indexed data sets: make samples of *seq_length* tokens, with labels on all of them.

    *path* is the prefix of a ``.bin`` and an ``.idx`` file, a pattern of them, or a list. The documents of a file are
    concatenated in its order. *split* are the shares of the documents that train, validation and test get, such as
    ``969, 30, 1``; *part* selects one. Tokens must be below *vocab_size*, by default the size of the tokenizer if there
    is one (``tokenizer: null`` for none).

    With *documents*, a sample is a document instead, of at most *seq_length* tokens (null: any number).

    The files are validated and memory-mapped; :func:`~automodel_ckpt.data.samples.token_arrays.windows_of` describes
    the samples. Without *documents*, a sample contains Megatron's with the sequence length *seq_length* - 1, its
    labels included. For several files with weights, use :func:`~automodel_ckpt.data.mixture.mixture`. Raises
    :class:`RecipeError` for invalid files.
    """
    shares = _shares(split)
    arrays, starts = [], []
    for prefix in _paths(path, is_index=True):
        index = read_index(prefix)
        # Rounded as Megatron does.
        first, last = (
            round(sum(shares[: _PARTS.index(part) + end]) * index.num_documents) for end in (0, 1)
        )
        arrays.append(index.tokens(first, last))
        if documents:
            starts.append(index.document_starts(first, last))
    if documents:
        found = _documents(arrays, starts, path, seq_length, truncation, max_samples)
    else:
        found = _windows(arrays, path, seq_length, None, max_samples)
    return _checked(found, vocab_size, tokenizer)


def nanogpt(
    path: str | list[str],
    seq_length: int | None = 1024,
    header: bool = True,
    dtype: Literal["uint16", "uint32"] = "uint16",
    bos_token: int | None = None,
    max_samples: int | None = None,
    vocab_size: int | None = None,
    documents: bool = False,
    eos_token: int | None = None,
    truncation: Literal["error", "right"] = "error",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TokenSpans:
    """Read nanoGPT's ``.bin`` files: make samples of *seq_length* tokens, with labels on all of them.

    *path* is a file, a pattern of files or a list. With *header* they have the header of modded-nanogpt and llm.c;
    without, they are raw tokens of type *dtype*. With *bos_token*, each sample begins at that token, for which the
    files are read once at the start. Tokens must be below *vocab_size*, by default the size of the tokenizer if there
    is one (``tokenizer: null`` for none). With *documents*, a sample is a document instead, of at most *seq_length*
    tokens (null: any number): it begins with *bos_token*, or it ends with *eos_token*.

    The files are memory-mapped; :func:`~automodel_ckpt.data.samples.token_arrays.windows_of` describes the samples.
    Raises :class:`RecipeError` for invalid files.
    """
    num_bytes = {"uint16": 2, "uint32": 4}[dtype]
    files = _paths(path, is_index=False)
    arrays = [read_header(file) if header else raw_tokens(file, num_bytes) for file in files]
    if documents:
        if (bos_token is None) == (eos_token is None):
            raise RecipeError(
                "the documents of a token file need one token that begins or ends them: set one of the two",
                where="dataset.bos_token, dataset.eos_token",
                value=f"{bos_token}, {eos_token}",
                hint="",
            )
        # A document begins behind the end of another one.
        token, offset = (eos_token, 1) if bos_token is None else (bos_token, 0)
        assert token is not None
        starts = [array.positions_of(token) + offset for array in arrays]
        found = _documents(arrays, starts, path, seq_length, truncation, max_samples)
    else:
        found = _windows(arrays, path, seq_length, bos_token, max_samples)
    return _checked(found, vocab_size, tokenizer)


def _checked(
    spans: TokenSpans, vocab_size: int | None, tokenizer: PreTrainedTokenizerBase | None
) -> TokenSpans:
    """Set the limit of the tokens. Raises :class:`RecipeError` if there is no sample."""
    if not len(spans):
        raise RecipeError(
            "the files have no sample of seq_length tokens, and no document of two",
            where="dataset.path",
            value=_content(spans.arrays),
            hint="give a smaller seq_length or other files; with split, check the share of this part",
        )
    spans.vocab_size = vocab_size
    if vocab_size is None and tokenizer is not None:
        spans.vocab_size = len(tokenizer)
    return spans


def _documents(
    arrays: Sequence[TokenArray],
    starts: Sequence[Integers],
    path: str | list[str],
    seq_length: int | None,
    truncation: str,
    max_samples: int | None,
) -> TokenSpans:
    require_choice("truncation", truncation, ("error", "right"))
    found = documents_of(arrays, starts, max_samples)
    num_tokens = sum(map(len, arrays))
    longest = int(found.lengths.max(initial=0))
    num_long = 0 if seq_length is None else int((found.lengths > seq_length).sum())
    if num_long and truncation == "error":
        raise RecipeError(
            "documents are longer than seq_length",
            where="dataset.seq_length",
            value=f"{num_long} of {len(found)} documents; seq_length {seq_length}, the longest has {longest} tokens",
            hint="set dataset.truncation right, or seq_length null with pretrain.split_documents",
        )
    cut = seq_length if truncation == "right" else None
    if cut is not None:
        found.lengths = np.minimum(found.lengths, cut)
    found.identity = identity_of(arrays, "documents", cut, len(found))
    log.info("%s: %s of %s", path, counted(len(found), "document"), counted(num_tokens, "token"))
    if num_long:
        log.warning(
            "%s: truncated %s to %s tokens", path, counted(num_long, "document"), seq_length
        )
    return found


def _windows(
    arrays: Sequence[TokenArray],
    path: str | list[str],
    seq_length: int | None,
    start_token: int | None,
    max_samples: int | None,
) -> TokenSpans:
    # A token and the one it predicts.
    require_range("seq_length", 0 if seq_length is None else seq_length, 2)
    assert seq_length is not None
    windows = windows_of(arrays, seq_length, start_token, max_samples)
    num_samples = counted(len(windows), "sample")
    log.info("%s: %s of %d tokens, from %s", path, num_samples, seq_length, _content(arrays))
    return windows


def _content(arrays: Sequence[TokenArray]) -> str:
    num_tokens = sum(map(len, arrays))
    return f"{counted(num_tokens, 'token')} in {counted(len(arrays), 'file')}"


def _paths(path: str | Sequence[str], *, is_index: bool) -> list[Path]:
    """List the files that *path* selects; of Megatron's with *is_index*, the names without ``.bin`` and ``.idx``."""
    given = [path] if isinstance(path, str) else list(path)
    found: dict[Path, None] = {}
    end = ".idx" if is_index else ""
    for each in given:
        text = os.path.expanduser(each)
        if is_index:
            text = text.removesuffix(".idx").removesuffix(".bin")
        matches = [text]
        if is_pattern(text):
            matches = [name.removesuffix(end) for name in sorted(glob.glob(text + end))]
        found |= dict.fromkeys(map(Path, matches))
    if not found:
        raise RecipeError(
            "no file of tokens is found",
            where="dataset.path",
            value=", ".join(map(str, given)),
            hint=f"check dataset.path; relative paths start at {Path.cwd()}",
        )
    return list(found)


def _shares(split: str) -> list[float]:
    """Parse the shares of train, validation and test, which may be percentages or fractions."""
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    is_valid = 1 <= len(shares) <= 3 and all(0 <= share < math.inf for share in shares)
    if not is_valid or sum(shares) <= 0:
        raise RecipeError(
            'the split is not a list of shares for train, validation and test, such as "99, 1, 0"',
            where="dataset.split",
            value=split,
            hint="",
        )
    shares += [0.0] * (3 - len(shares))
    return [share / sum(shares) for share in shares]
