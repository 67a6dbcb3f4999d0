"""Damaged and hostile files of tokens: each gives an error with its path, before any token is read."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from automodel_ckpt.data.token_files import megatron, nanogpt
from automodel_ckpt.errors import RecipeError

FIXTURE = Path(__file__).parents[1] / "fixtures/megatron/tokens"
HEADER = 9 + 8 + 1 + 8 + 8
NUM_SEQUENCES = 10


def put(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def number(offset: int, value: int, code: str = "<q") -> Callable[[Path], None]:
    return lambda prefix: put(prefix.with_suffix(".idx"), offset, struct.pack(code, value))


def shorter(suffix: str, num_bytes: int) -> Callable[[Path], None]:
    def cut(prefix: Path) -> None:
        path = prefix.with_suffix(suffix)
        os.truncate(path, path.stat().st_size - num_bytes)

    return cut


def without(suffix: str) -> Callable[[Path], None]:
    return lambda prefix: prefix.with_suffix(suffix).unlink()


def pipe(prefix: Path) -> None:
    prefix.with_suffix(".bin").unlink()
    os.mkfifo(prefix.with_suffix(".bin"))


POINTERS = HEADER + 4 * NUM_SEQUENCES
DOCUMENTS = HEADER + 12 * NUM_SEQUENCES
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no index": (without(".idx"), "cannot be read"),
    "no tokens": (without(".bin"), "cannot be read"),
    "a pipe": (pipe, "not a regular file"),
    "another magic": (number(0, 0), "not an index of Megatron"),
    "an empty index": (shorter(".idx", 234), "not an index of Megatron"),
    "another version": (number(9, 2), "unknown version"),
    "floats": (number(17, 7, "<B"), "no type of tokens"),
    "an unknown type": (number(17, 99, "<B"), "no type of tokens"),
    "a wider type": (number(17, 5, "<B"), "overlap or have gaps"),
    "a huge count": (number(18, 2**64 - 1, "<Q"), "does not fit its counts"),
    "a count that wraps": (number(18, 2**62, "<Q"), "does not fit its counts"),
    "too many documents": (number(26, 2**61, "<Q"), "does not fit its counts"),
    "no document": (number(26, 0, "<Q"), "does not fit its counts"),
    "a truncated index": (shorter(".idx", 1), "does not fit its counts"),
    "truncated tokens": (shorter(".bin", 2), "does not fit its index"),
    "a negative length": (number(HEADER, -1, "<i"), "negative length"),
    "a huge length": (number(HEADER, 2**31 - 1, "<i"), "overlap or have gaps"),
    "overlapping sequences": (number(POINTERS + 8, 0), "overlap or have gaps"),
    "a pointer out of the file": (number(POINTERS, 2**62), "overlap or have gaps"),
    "a negative pointer": (number(POINTERS, -8), "overlap or have gaps"),
    "documents out of order": (number(DOCUMENTS + 8, 9), "do not cover the sequences"),
    "a document out of the index": (number(DOCUMENTS + 72, 99), "do not cover the sequences"),
    "a negative document": (number(DOCUMENTS, -1), "do not cover the sequences"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_damaged_index_is_an_error_with_its_path(tmp_path: Path, attack: str) -> None:
    for suffix in (".idx", ".bin"):
        shutil.copy(FIXTURE / f"small{suffix}", tmp_path)
    change, what = ATTACKS[attack]
    change(tmp_path / "small")
    with pytest.raises(RecipeError, match=rf"{what}[\s\S]*{tmp_path}/small"):
        megatron(str(tmp_path / "small"), 8)


def test_negative_tokens_are_errors(tmp_path: Path) -> None:
    for suffix in (".idx", ".bin"):
        shutil.copy(FIXTURE / f"large{suffix}", tmp_path)
    put(tmp_path / "large.bin", 8, struct.pack("<i", -5))
    with pytest.raises(RecipeError, match=r"large.bin, token 2 \(byte 8\)[\s\S]*token id -5"):
        megatron(str(tmp_path / "large"), 8)[0]


@pytest.mark.parametrize(
    ("numbers", "num_bytes", "what"),
    [
        ((1, 1, 10), 20, "has no header"),
        ((20240520, 2, 10), 20, "unknown version"),
        ((20240520, 1, 11), 20, "does not fit its header"),
        ((20240520, 1, -1), 20, "does not fit its header"),
        ((20240520, 1, 2**31 - 1), 20, "does not fit its header"),
        ((278895051, 1, 10, 3), 20, "invalid size of tokens"),
        ((278895051, 1, 10, 0), 20, "invalid size of tokens"),
        ((278895051, 1, 10, 4), 20, "does not fit its header"),
        ((20240520, 1, 0), 0, "no sample of seq_length tokens"),
        ((20240520,), -1000, "has no header"),
    ],
)
def test_a_damaged_header_is_an_error(
    tmp_path: Path, numbers: tuple[int, ...], num_bytes: int, what: str
) -> None:
    header = np.zeros(256, "<i4")
    header[: len(numbers)] = numbers
    content = header.tobytes()[: 1024 + min(num_bytes, 0)] + bytes(max(num_bytes, 0))
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(RecipeError, match=what):
        nanogpt(str(tmp_path / "a.bin"), 8)


def test_raw_tokens_of_half_a_token_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(21))
    with pytest.raises(RecipeError, match="not a multiple of the size of a token"):
        nanogpt(str(tmp_path / "a.bin"), 8, header=False)
