"""Megatron's indexed data sets: ``PREFIX.idx`` and ``PREFIX.bin``.

Facts of version 1 (megatron/core/datasets/indexed_dataset.py): ``.idx`` begins with the 9 bytes ``MMIDIDX\\0\\0``, the
version 1 (uint64), the code of the tokens' type (uint8), the number of sequences N and the number of document indices D
(uint64). Then follow N lengths in tokens (int32), N pointers in bytes (int64), D document indices (int64: 0, and for
each document the number of the sequence after its last), and with several modalities N modes (int8). All numbers are
little endian. ``.bin`` contains the tokens of all sequences without gaps.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.collate import Integers
from automodel_ckpt.data.samples.token_arrays import TokenArray, damaged_tokens, file_size

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
_HEADER_BYTES = len(_MAGIC) + _HEADER.size
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code of a type -> type of the tokens. The codes 6 and 7 are floats, which are no tokens."""
_CHECKED = 1 << 20
_HINT = "use the .bin and .idx files of one run of Megatron's preprocessing, completely copied"


@dataclass(frozen=True)
class MegatronIndex:
    """A validated index: *documents* are the document indices, *lengths* those of the sequences, memory-mapped."""

    path: Path
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: Integers
    documents: Integers

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def tokens(self, first: int, last: int) -> TokenArray:
        """Return the tokens of the documents *first* to *last* - 1, which are adjacent in the file."""
        start = self._offset(int(self.documents[first]))
        end = self._offset(int(self.documents[last]))
        count = (end - start) // self.dtype.itemsize
        return TokenArray(self.path.with_suffix(".bin"), self.dtype, start, count)

    def document_starts(self, first: int, last: int) -> Integers:
        """Return the first token of each of the documents *first* to *last* - 1, counted from the first of them."""
        sequences = np.asarray(self.documents[first:last])
        # Empty documents at the end begin after the last sequence, and have no token.
        sequences = sequences[sequences < len(self.pointers)]
        first_sequence = int(self.documents[first])
        offsets = self.pointers[sequences] - self._offset(first_sequence)
        return np.asarray(offsets // self.dtype.itemsize, np.int64)

    def _offset(self, sequence: int) -> int:
        """The first byte of a sequence; for the number of sequences, the end of the file."""
        if sequence < len(self.pointers):
            return int(self.pointers[sequence])
        if sequence == 0:
            return 0
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize


def read_index(prefix: Path) -> MegatronIndex:
    """Read and validate ``PREFIX.idx``. Raises :class:`RecipeError` for a file in another format or with wrong counts.

    Lengths must be positive or 0, pointers without gaps or overlaps, document indices ascending, and the size of
    ``PREFIX.bin`` that of all sequences.
    """
    path = prefix.parent / f"{prefix.name}.idx"
    size = file_size(path)
    with open(path, "rb") as file:
        head = file.read(_HEADER_BYTES)
    if len(head) < _HEADER_BYTES or not head.startswith(_MAGIC):
        raise damaged_tokens(path, "this is not an index of Megatron", repr(head[:9]), _HINT)
    version, code, num_sequences, num_indices = _HEADER.unpack(head[len(_MAGIC) :])
    if version != 1:
        hint = "only version 1 is supported"
        raise damaged_tokens(path, "the index has an unknown version", version, hint)
    if code not in _TYPES:
        hint = f"the codes of tokens are {', '.join(map(str, _TYPES))}"
        raise damaged_tokens(path, "the index has no type of tokens", f"code {code}", hint)
    expected = _HEADER_BYTES + num_sequences * 12 + num_indices * 8
    # With several modalities, one more byte per sequence follows.
    if size not in (expected, expected + num_sequences) or num_indices < 1:
        counts = f"{num_sequences} sequences, {num_indices} document indices, {size} bytes"
        raise damaged_tokens(path, "the size of the index does not fit its counts", counts, _HINT)
    lengths = _mapped(path, "<i4", _HEADER_BYTES, num_sequences)
    pointers = _mapped(path, "<i8", _HEADER_BYTES + 4 * num_sequences, num_sequences)
    documents = _mapped(path, "<i8", _HEADER_BYTES + 12 * num_sequences, num_indices)
    index = MegatronIndex(path, np.dtype(_TYPES[code]), lengths, pointers, documents)
    _check_sequences(index)
    _check_documents(index)
    return index


def _mapped(path: Path, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))


def _check_sequences(index: MegatronIndex) -> None:
    """Raise :class:`RecipeError` unless the sequences fill ``.bin`` in order, without gaps or overlaps."""
    expected = 0
    # In blocks: an index may have hundreds of millions of sequences.
    for start in range(0, len(index.lengths), _CHECKED):
        lengths = index.lengths[start : start + _CHECKED].astype(np.int64)
        if lengths.min() < 0:
            number = start + int(lengths.argmin())
            value = f"sequence {number}: {lengths.min()} tokens"
            raise damaged_tokens(index.path, "a sequence has a negative length", value, _HINT)
        ends = expected + np.cumsum(lengths) * index.dtype.itemsize
        starts = np.concatenate(([expected], ends[:-1]))
        wrong = np.flatnonzero(index.pointers[start : start + _CHECKED] != starts)
        if len(wrong):
            number = start + int(wrong[0])
            value = (
                f"sequence {number} at byte {index.pointers[number]}, expected {starts[wrong[0]]}"
            )
            raise damaged_tokens(index.path, "sequences overlap or have gaps", value, _HINT)
        expected = int(ends[-1])
    path = index.path.with_suffix(".bin")
    size = file_size(path)
    if size != expected:
        value = f"{size} bytes, but its index has {expected}"
        raise damaged_tokens(path, "the file of tokens does not fit its index", value, _HINT)


def _check_documents(index: MegatronIndex) -> None:
    documents = index.documents
    is_ordered = True
    for start in range(0, len(documents), _CHECKED):
        # One more, so that the last of a block is compared with the first of the next.
        block = documents[start : start + _CHECKED + 1]
        is_ordered = is_ordered and bool((block[:-1] <= block[1:]).all())
    if not is_ordered or documents[0] != 0 or documents[-1] != len(index.lengths):
        value = f"from {documents[0]} to {documents[-1]}, {len(index.lengths)} sequences"
        raise damaged_tokens(
            index.path, "the document indices do not cover the sequences in order", value, _HINT
        )
