"""Arrays of tokens in binary files of other programs, and the data set of windows of them.

Nothing is converted: the files are memory-mapped, and a sample is read when it is used.

Files of nanoGPT are raw uint16, or have the header of modded-nanogpt (data/cached_fineweb10B.py) and llm.c
(dev/data/data_common.py) before the tokens: 256 numbers of type int32, little endian. The first is 20240520, the
second the version 1, the third the number of tokens, which are uint16. NeMo AutoModel writes 278895051 as the first
number, and the bytes per token (2 or 4, unsigned) as the fourth.

Megatron's indexed data sets are ``PREFIX.idx`` and ``PREFIX.bin``. Facts of version 1
(megatron/core/datasets/indexed_dataset.py): ``.idx`` begins with the 9 bytes ``MMIDIDX\\0\\0``, the version 1 (uint64),
the code of the tokens' type (uint8), the number of sequences N and the number of document indices D (uint64). Then
follow N lengths in tokens (int32), N pointers in bytes (int64), D document indices (int64: 0, and for each document the
number of the sequence after its last), and with several modalities N modes (int8). All numbers are little endian.
``.bin`` contains the tokens of all sequences without gaps.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.collate import (
    Integers,
    Sample,
    at_most,
    require_index,
)
from automodel_ckpt.errors import RecipeError

_DIGESTED_BYTES = 1 << 16
_SCANNED_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenArray:
    """The *tokens* at byte *offset* of a file, memory-mapped: a plain array, which is sliced faster than a memmap."""

    path: Path
    offset: int
    tokens: npt.NDArray[Any]

    @classmethod
    def of(cls, path: Path, dtype: npt.DTypeLike, offset: int, count: int) -> Self:
        """Map *count* tokens of type *dtype*."""
        tokens = np.empty(0, dtype)
        # A mapping cannot be empty.
        if count:
            tokens = np.asarray(np.memmap(path, dtype, "r", offset, (count,)))
        return cls(path, offset, tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions_of(self, token: int) -> Integers:
        """The positions of *token*, ascending. Reads the whole file once."""
        found = [np.empty(0, np.int64)]
        for start in range(0, len(self), _SCANNED_TOKENS):
            block = self.tokens[start : start + _SCANNED_TOKENS]
            found.append(np.flatnonzero(block == token) + start)
        return np.concatenate(found)


Starts = range | Integers
"""The first tokens of the samples of an array."""


class TokenSpans:
    """A map-style data set of samples that are adjacent tokens of *arrays*, with labels on all of them.

    *starts* are the first tokens of the samples of each array, *lengths* their numbers of tokens. *identity* is a
    digest of the data. Raises :class:`RecipeError` when a sample is read that has a negative token, or one of
    :attr:`vocab_size` or more.
    """

    draws_nothing = True

    def __init__(
        self,
        arrays: Sequence[TokenArray],
        starts: Sequence[Starts],
        lengths: Integers,
        identity: str,
    ) -> None:
        self.arrays = list(arrays)
        self.lengths = lengths
        self.identity = identity
        self.vocab_size: int | None = None
        self._starts = list(starts)
        self._ends = list(accumulate(map(len, starts)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        require_index(index, len(self))
        number = bisect_right(self._ends, index)
        start = int(self._starts[number][index - self._ends[number] + len(self._starts[number])])
        array = self.arrays[number]
        tokens = array.tokens[start : start + int(self.lengths[index])].astype(np.int64)
        is_invalid = tokens < 0
        if self.vocab_size is not None:
            is_invalid |= tokens >= self.vocab_size
        if is_invalid.any():
            first = int(is_invalid.argmax())
            position = start + first
            byte = array.offset + position * array.tokens.itemsize
            raise RecipeError(
                "a token is outside of the vocabulary",
                where=f"{array.path}, token {position} (byte {byte})",
                value=f"token id {tokens[first]}, vocabulary size {self.vocab_size or 'not given'}",
                hint="use the tokenizer that the file was made with, and the file's format and dtype",
            )
        return {"input_ids": tokens.tolist(), "labels": tokens.tolist()}


def windows_of(
    arrays: Sequence[TokenArray],
    seq_length: int,
    start_token: int | None = None,
    max_samples: int | None = None,
) -> TokenSpans:
    """Divide arrays into windows of *seq_length* tokens.

    Window i of an array begins at ``i * (seq_length - 1)``: it repeats the last token of the window before, so that
    each token is predicted once. With *start_token*, a window begins at the next occurrence of that token instead. A
    window does not cross arrays, and tokens after the last whole window of an array are not used.
    """
    starts: list[Starts] = []
    for array in arrays:
        end = max(len(array) - seq_length + 1, 0)
        if start_token is None:
            starts.append(range(0, end, seq_length - 1))
            continue
        positions = array.positions_of(start_token)
        chosen: list[int] = []
        # Windows do not overlap, except for one token.
        next_start = 0
        while (found := int(np.searchsorted(positions, next_start))) < len(positions):
            if positions[found] >= end:
                break
            chosen.append(int(positions[found]))
            next_start = chosen[-1] + seq_length - 1
        starts.append(np.array(chosen, np.int64))
    # A view of one number: there may be billions of windows.
    num_samples = at_most(max_samples, sum(map(len, starts)))
    lengths = np.broadcast_to(np.int64(seq_length), num_samples)
    identity = identity_of(arrays, seq_length, start_token)
    return TokenSpans(arrays, starts, lengths, identity)


def documents_of(
    arrays: Sequence[TokenArray],
    starts: Sequence[Integers],
    max_samples: int | None = None,
) -> TokenSpans:
    """Divide arrays into documents. Documents of fewer than two tokens are left out.

    *starts* [n] are the ascending first tokens of the documents of each array; tokens before the first one are a
    document, too.
    """
    firsts: list[Starts] = []
    # Without an array, np.concatenate() needs an empty one.
    lengths = [np.empty(0, np.int64)]
    for array, array_starts in zip(arrays, starts, strict=True):
        first = np.unique(np.concatenate(([0], array_starts[array_starts < len(array)])))
        length = np.diff(first, append=len(array))
        is_document = length >= 2
        firsts.append(first[is_document])
        lengths.append(length[is_document])
    joined = np.concatenate(lengths)
    return TokenSpans(arrays, firsts, joined[: at_most(max_samples, len(joined))], "")


def identity_of(arrays: Sequence[TokenArray], *settings: object) -> str:
    """Return a digest of the files' names, sizes, first and last bytes: reading them whole could take hours."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=12)
    for array in arrays:
        digest.update(
            f"{array.path.name} {array.tokens.dtype} {array.offset} {len(array)}".encode()
        )
        with open(array.path, "rb") as file:
            digest.update(file.read(_DIGESTED_BYTES))
            file_size = os.fstat(file.fileno()).st_size
            file.seek(max(0, file_size - _DIGESTED_BYTES))
            digest.update(file.read(_DIGESTED_BYTES))
    return digest.hexdigest()


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises :class:`RecipeError` for anything else."""
    hint = "check dataset.path"
    try:
        status = os.stat(path)
    except OSError as error:
        raise RecipeError.of_system(error, "a file of tokens cannot be read", hint=hint) from error
    if not stat.S_ISREG(status.st_mode):
        raise RecipeError(
            "a file of tokens is not a regular file", where=str(path), value="", hint=hint
        )
    return status.st_size


_MEGATRON_HINT = (
    "use the .bin and .idx files of one run of Megatron's preprocessing, completely copied"
)


def damaged_tokens(path: Path, what: str, value: object, hint: str = _MEGATRON_HINT) -> RecipeError:
    """Make the error for a file of tokens with invalid content."""
    return RecipeError(what, where=str(path), value=value, hint=hint)


_MAGIC = 20240520
_MAGIC_WITH_SIZE = 278895051
_HEADER_BYTES = 1024
_TYPES = {2: "<u2", 4: "<u4"}


def read_header(path: Path) -> TokenArray:
    """Return the tokens of a file with a header. Raises :class:`RecipeError` if the header or the size is wrong."""
    size = file_size(path)
    with open(path, "rb") as file:
        head = file.read(_HEADER_BYTES)
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4").tolist()
    if len(head) < _HEADER_BYTES or numbers[0] not in (_MAGIC, _MAGIC_WITH_SIZE):
        raise damaged_tokens(
            path,
            "this file of tokens has no header",
            f"it begins with {head[:8]!r}",
            "for raw tokens, as nanoGPT's prepare.py writes them, set dataset.header false",
        )
    magic, version, count, num_bytes = numbers[:4]
    if magic == _MAGIC:
        num_bytes = 2
    is_known = version == 1 and num_bytes in _TYPES
    if not is_known or count < 0 or size - _HEADER_BYTES != count * num_bytes:
        raise damaged_tokens(
            path,
            "the header has an unknown version or an invalid size of tokens, or the file does not fit its header",
            f"{size} bytes, header of version {version} with {count} tokens of {num_bytes} bytes",
            "copy or download the file again; only version 1 with tokens of 2 or 4 bytes is supported",
        )
    return TokenArray.of(path, _TYPES[num_bytes], _HEADER_BYTES, count)


def raw_tokens(path: Path, num_bytes: int) -> TokenArray:
    """Return the tokens of a file without a header: unsigned integers of *num_bytes*, 2 or 4.

    Raises :class:`RecipeError` if the size of the file is not a multiple.
    """
    size = file_size(path)
    if size % num_bytes:
        raise damaged_tokens(
            path,
            "the size of the file is not a multiple of the size of a token",
            f"{size} bytes, {num_bytes} per token",
            "copy the file again, or set dataset.dtype",
        )
    return TokenArray.of(path, _TYPES[num_bytes], 0, size // num_bytes)


_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<QBQQ")
_MEGATRON_HEADER_BYTES = len(_MEGATRON_MAGIC) + _MEGATRON_HEADER.size
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code of a type -> type of the tokens. The codes 6 and 7 are floats, which are no tokens."""
_CHECKED = 1 << 20


@dataclass(frozen=True)
class MegatronIndex:
    """A validated index: *documents* are the document indices, and *offsets* the bytes at which sequences begin.

    Both are memory-mapped. The sequences have *num_bytes* together.
    """

    path: Path
    dtype: np.dtype[Any]
    offsets: Integers
    documents: Integers
    num_bytes: int

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def tokens(self, first: int, last: int) -> TokenArray:
        """Return the tokens of the documents *first* to *last* - 1, which are adjacent in the file."""
        start, end = self._offset(first), self._offset(last)
        count = (end - start) // self.dtype.itemsize
        return TokenArray.of(self.path.with_suffix(".bin"), self.dtype, start, count)

    def document_starts(self, first: int, last: int) -> Integers:
        """Return the first token of each of the documents *first* to *last* - 1, counted from the first of them."""
        sequences = np.asarray(self.documents[first:last])
        # Empty documents at the end begin after the last sequence, and have no token.
        sequences = sequences[sequences < len(self.offsets)]
        offsets = self.offsets[sequences] - self._offset(first)
        return np.asarray(offsets // self.dtype.itemsize, np.int64)

    def _offset(self, document: int) -> int:
        """The first byte of a document; for the number of documents, the end of the file."""
        sequence = self.documents[document]
        is_end = sequence == len(self.offsets)
        return self.num_bytes if is_end else int(self.offsets[sequence])


def read_index(prefix: Path) -> MegatronIndex:
    """Read and validate ``PREFIX.idx``. Raises :class:`RecipeError` for a file in another format or with wrong counts.

    Lengths must be positive or 0, pointers without gaps or overlaps, document indices ascending, and the size of
    ``PREFIX.bin`` equal to the size of all sequences.
    """
    path = prefix.parent / f"{prefix.name}.idx"
    size = file_size(path)
    with open(path, "rb") as file:
        head = file.read(_MEGATRON_HEADER_BYTES)
    if len(head) < _MEGATRON_HEADER_BYTES or not head.startswith(_MEGATRON_MAGIC):
        raise damaged_tokens(path, "this is not an index of Megatron", repr(head[:9]))
    version, code, num_sequences, num_indices = _MEGATRON_HEADER.unpack(
        head[len(_MEGATRON_MAGIC) :]
    )
    expected = _MEGATRON_HEADER_BYTES + num_sequences * 12 + num_indices * 8
    # With several modalities, one more byte per sequence follows.
    fits = size in (expected, expected + num_sequences) and num_indices >= 1
    if version != 1 or code not in _MEGATRON_TYPES or not fits:
        counts = f"{num_sequences} sequences, {num_indices} document indices, {size} bytes"
        what = "the index has an unknown version or no type of tokens, or does not fit its counts"
        raise damaged_tokens(path, what, f"version {version}, code {code}, {counts}")
    columns = []
    offset = _MEGATRON_HEADER_BYTES
    for kind, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_indices)):
        columns.append(TokenArray.of(path, kind, offset, count).tokens)
        offset += columns[-1].nbytes
    lengths, offsets, documents = columns
    dtype = np.dtype(_MEGATRON_TYPES[code])
    num_bytes = _checked_bytes(path, lengths, offsets, dtype.itemsize)
    is_ordered = bool((documents[:-1] <= documents[1:]).all())
    if not is_ordered or documents[0] != 0 or documents[-1] != num_sequences:
        value = f"from {documents[0]} to {documents[-1]}, {num_sequences} sequences"
        what = "the document indices do not cover the sequences in order"
        raise damaged_tokens(path, what, value)
    return MegatronIndex(path, dtype, offsets, documents, num_bytes)


def _checked_bytes(
    index_path: Path, lengths: npt.NDArray[Any], offsets: Integers, token_bytes: int
) -> int:
    """The size of ``.bin``. Raises :class:`RecipeError` unless the sequences fill it in order, without gaps."""
    expected = 0
    # In blocks: an index may have hundreds of millions of sequences.
    for start in range(0, len(lengths), _CHECKED):
        block = lengths[start : start + _CHECKED].astype(np.int64)
        ends = expected + np.cumsum(block) * token_bytes
        starts = np.concatenate(([expected], ends[:-1]))
        found = offsets[start : start + _CHECKED]
        wrong = np.flatnonzero((block < 0) | (found != starts))
        if len(wrong):
            first = int(wrong[0])
            value = f"sequence {start + first}: {block[first]} tokens at byte {found[first]}, not {starts[first]}"
            what = "sequences overlap or have gaps, or a negative length"
            raise damaged_tokens(index_path, what, value)
        expected = int(ends[-1])
    path = index_path.with_suffix(".bin")
    size = file_size(path)
    if size != expected:
        value = f"{size} bytes, but its index has {expected}"
        raise damaged_tokens(path, "the file of tokens does not fit its index", value)
    return size
