"""Arrays of tokens in binary files of other programs, and the data set of windows of them.

Nothing is converted: the files are memory-mapped, and a sample is read when it is used. The headers of the two formats
are read by :mod:`.megatron_tokens` and :mod:`.nanogpt_tokens`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from automodel_ckpt.errors import RecipeError, os_problem

_DIGESTED_BYTES = 1 << 16
_SCANNED_TOKENS = 1 << 22


@dataclass
class TokenArray:
    """The *count* tokens of type *dtype* at byte *offset* of a file. The file is mapped when a token is first read."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    count: int
    _mapped: npt.NDArray[Any] | None = field(default=None, init=False, repr=False)

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The tokens, shape [count], memory-mapped."""
        if self._mapped is None:
            shape = (self.count,)
            mapped = np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=shape)
            # A plain array over the mapping: numpy's memmap class takes ten times as long to slice.
            self._mapped = np.asarray(mapped)
        return self._mapped

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file itself; otherwise the array would be copied to it.
        return self.__dict__ | {"_mapped": None}

    def positions_of(self, token: int) -> npt.NDArray[np.int64]:
        """The positions of *token*, ascending. Reads the whole file once."""
        found = []
        for start in range(0, self.count, _SCANNED_TOKENS):
            block = self.tokens[start : start + _SCANNED_TOKENS]
            found.append(np.flatnonzero(block == token) + start)
        return np.concatenate(found) if found else np.empty(0, np.int64)


class TokenWindows:
    """A map-style data set of windows of *seq_length* tokens of several arrays, with labels on all of them.

    Window i of an array begins at ``i * (seq_length - 1)``: it repeats the last token of the window before, so that
    each token is predicted once. With *start_token*, a window begins at the next occurrence of that token instead. A
    window does not cross arrays, and tokens after the last whole window of an array are not used.

    Raises :class:`RecipeError` when a sample is read that has a negative token, or one of *vocab_size* or more.
    """

    draws_nothing = True

    def __init__(
        self,
        arrays: Sequence[TokenArray],
        seq_length: int,
        *,
        vocab_size: int | None,
        start_token: int | None = None,
        max_samples: int | None = None,
    ) -> None:
        self.arrays = list(arrays)
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self._starts: list[npt.NDArray[np.int64]] | None = None
        if start_token is None:
            counts = [max(array.count - 1, 0) // (seq_length - 1) for array in arrays]
        else:
            self._starts = [_aligned_starts(array, seq_length, start_token) for array in arrays]
            counts = [len(starts) for starts in self._starts]
        self._ends = list(accumulate(counts))
        self.num_samples = self._ends[-1] if counts else 0
        if max_samples is not None:
            self.num_samples = min(self.num_samples, max_samples)
        self.identity = _identity(arrays, seq_length, start_token)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of each sample."""
        return np.full(self.num_samples, self.seq_length, np.int64)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        # IndexError also ends an iteration over this class, which has no __iter__.
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        window = index - (self._ends[number - 1] if number else 0)
        start = window * (self.seq_length - 1)
        if self._starts is not None:
            start = int(self._starts[number][window])
        array = self.arrays[number]
        tokens = array.tokens[start : start + self.seq_length].astype(np.int64)
        check_tokens(array, start, tokens, self.vocab_size)
        return {"input_ids": tokens.tolist(), "labels": tokens.tolist()}


def check_tokens(
    array: TokenArray, start: int, tokens: npt.NDArray[np.int64], vocab_size: int | None
) -> None:
    """Raise :class:`RecipeError` for *tokens*, those of *array* from *start* on, that are negative or too high."""
    highest, lowest = int(tokens.max()), int(tokens.min())
    is_above = vocab_size is not None and highest >= vocab_size
    if lowest >= 0 and not is_above:
        return
    invalid = lowest if lowest < 0 else highest
    position = start + int(np.argmax(tokens == invalid))
    raise RecipeError(
        "a token is outside of the vocabulary",
        where=f"{array.path}, token {position} (byte {array.offset + position * array.dtype.itemsize})",
        value=f"token id {invalid}, vocabulary size {vocab_size or 'not given'}",
        hint="use the tokenizer that the file was made with, and the file's format and dtype",
    )


class TokenDocuments:
    """A map-style data set of the documents in several arrays, with labels on all tokens.

    *starts* [n] are the ascending first tokens of the documents of each array; tokens before the first one are a
    document, too. Documents of fewer than two tokens are left out. Longer ones than *seq_length* are truncated. Raises
    :class:`RecipeError` when a sample is read that has a negative token, or one of *vocab_size* or more.
    """

    draws_nothing = True

    def __init__(
        self,
        arrays: Sequence[TokenArray],
        starts: Sequence[npt.NDArray[np.int64]],
        seq_length: int | None,
        *,
        vocab_size: int | None,
        max_samples: int | None = None,
    ) -> None:
        self.arrays = list(arrays)
        self.vocab_size = vocab_size
        # Without an array, these are empty: np.concatenate() needs at least one.
        numbers = [np.empty(0, np.int64)]
        first_tokens = [np.empty(0, np.int64)]
        lengths = [np.empty(0, np.int64)]
        for number, (array, array_starts) in enumerate(zip(arrays, starts, strict=True)):
            first, length = _bounds(array, array_starts)
            numbers.append(np.full(len(first), number))
            first_tokens.append(first)
            lengths.append(length)
        self._numbers = np.concatenate(numbers)[:max_samples]
        self._starts = np.concatenate(first_tokens)
        self.whole_lengths = np.concatenate(lengths)[:max_samples]
        """The number of tokens of each document before it is truncated."""
        self.lengths = self.whole_lengths
        if seq_length is not None:
            self.lengths = np.minimum(self.lengths, seq_length)
        self.identity = _identity(arrays, "documents", seq_length, len(self))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        array = self.arrays[int(self._numbers[index])]
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        tokens = array.tokens[start:end].astype(np.int64)
        check_tokens(array, start, tokens, self.vocab_size)
        return {"input_ids": tokens.tolist(), "labels": tokens.tolist()}


def _bounds(
    array: TokenArray, starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first token and the length of each document of at least two tokens."""
    first = np.unique(np.concatenate(([0], starts[starts < array.count])))
    lengths = np.diff(first, append=array.count)
    is_document = lengths >= 2
    return first[is_document], lengths[is_document]


def _aligned_starts(array: TokenArray, seq_length: int, start_token: int) -> npt.NDArray[np.int64]:
    """Return the starts of windows that begin at *start_token* and do not overlap, except for one token."""
    positions = array.positions_of(start_token)
    positions = positions[positions <= array.count - seq_length]
    starts: list[int] = []
    next_allowed = 0
    while True:
        found = int(np.searchsorted(positions, next_allowed))
        if found == len(positions):
            return np.array(starts, np.int64)
        start = int(positions[found])
        starts.append(start)
        next_allowed = start + seq_length - 1


def _identity(arrays: Sequence[TokenArray], *settings: object) -> str:
    """Return a digest of the files' names, sizes, first and last bytes: reading them whole could take hours."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=12)
    for array in arrays:
        digest.update(f"{array.path.name} {array.dtype} {array.offset} {array.count}".encode())
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
        raise RecipeError.all_of(
            [os_problem(error, "a file of tokens cannot be read", hint=hint)]
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise RecipeError(
            "a file of tokens is not a regular file", where=str(path), value="", hint=hint
        )
    return status.st_size


def damaged_tokens(path: Path, what: str, value: object, hint: str) -> RecipeError:
    """Make the error for a file of tokens whose content is invalid."""
    return RecipeError(what, where=str(path), value=value, hint=hint)
