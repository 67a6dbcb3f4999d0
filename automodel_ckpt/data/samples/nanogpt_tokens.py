"""Token files of nanoGPT: raw uint16, or the header of modded-nanogpt (llm.c) before the tokens.

Facts of the header (modded-nanogpt, data/cached_fineweb10B.py; llm.c, dev/data/data_common.py): 256 numbers of type
int32, little endian. The first is 20240520, the second the version 1, the third the number of tokens, which are uint16.
NeMo AutoModel writes 278895051 as the first number, and the bytes per token (2 or 4, unsigned) as the fourth.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from automodel_ckpt.data.samples.token_arrays import TokenArray, damaged_tokens, file_size

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
    if version != 1:
        hint = "only version 1 is supported"
        raise damaged_tokens(path, "the header has an unknown version", version, hint)
    if magic == _MAGIC:
        num_bytes = 2
    if num_bytes not in _TYPES:
        hint = "a token has 2 or 4 bytes"
        raise damaged_tokens(path, "the header has an invalid size of tokens", num_bytes, hint)
    fits = size - _HEADER_BYTES == count * num_bytes
    if not fits or count < 0:
        raise damaged_tokens(
            path,
            "the size of the file does not fit its header",
            f"{size} bytes, header with {count} tokens of {num_bytes} bytes",
            "copy or download the file again",
        )
    return TokenArray(path, np.dtype(_TYPES[num_bytes]), _HEADER_BYTES, count)


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
    return TokenArray(path, np.dtype(_TYPES[num_bytes]), 0, size // num_bytes)
