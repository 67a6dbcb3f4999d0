"""Tokens by a formula that other programs can compute, too (tests/fixtures/trainer/make.py has the same)."""

from __future__ import annotations

VOCABULARY, LENGTH = 32, 12


class Rows:
    """*num_samples* samples of 12 tokens, all with labels."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index >= self.num_samples:
            raise IndexError(index)
        return {"input_ids": row(index), "labels": row(index)}


def row(index: int) -> list[int]:
    """Return the tokens of a sample."""
    return [
        (7 * index * index + 3 * j * j + 5 * index * j + 11) % VOCABULARY for j in range(LENGTH)
    ]
