"""Small hand-made data sets, whose samples carry their number and random numbers, and helpers for tests of data."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.data.collate import PadCollator

Sample = dict[str, Any]


def sample(number: int) -> Sample:
    draws = [random.random(), float(np.random.random()), float(torch.rand(()))]
    return {"number": number, "draws": draws}


def stack(samples: list[Sample]) -> dict[str, torch.Tensor]:
    return {
        "numbers": torch.tensor([item["number"] for item in samples]),
        "draws": torch.tensor([item["draws"] for item in samples], dtype=torch.float64),
        "labels": torch.tensor([[item["number"]] for item in samples]),
    }


class Numbers:
    """Map-style: sample i is the number i."""

    def __init__(self, length: int, broken: int | None = None) -> None:
        self.length = length
        self.broken = broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index == self.broken:
            raise KeyError("no such field")
        return sample(index)


class Stream:
    """Iterable, without state."""

    def __init__(self, length: int, broken: int | None = None) -> None:
        self.length = length
        self.broken = broken
        self.read = 0

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self.length):
            if number == self.broken:
                raise OSError("connection lost")
            self.read += 1
            yield sample(number)


class StatefulStream:
    """Iterable with its own state, which it carries over epochs: it counts on through them, and ends each one short."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0
        self.passes = 0
        self.read = 0

    def __iter__(self) -> Iterator[Sample]:
        while self.position < self.length:
            self.position += 1
            self.read += 1
            yield sample(1000 * self.passes + self.position - 1)
        self.position = 0
        self.passes += 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.passes = state["position"], state["passes"]


class StreamThatRemembersItsEnd(StatefulStream):
    """Restored at its end it gives nothing, and starts over only at the next pass."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.restored = False

    def __iter__(self) -> Iterator[Sample]:
        self.position = self.position if self.restored else 0
        self.restored = False
        while self.position < self.length:
            self.position += 1
            yield sample(self.position - 1)

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.restored = True


def jsonl(path: Path, *rows: Any) -> str:
    """Write rows, or lines that are text, as a file of JSON lines, and return its path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def write(directory: Path, *rows: Any) -> str:
    """Write rows as a file of JSON lines, and return its path."""
    return jsonl(directory / "rows.jsonl", *rows)


def padded_loader(dataset: Any, dp_rank: int = 0, dp_size: int = 1, **options: Any) -> Any:
    """A loader of padded micro-batches of one sample, four in a global batch."""
    settings: dict[str, Any] = {"global_batch_size": 4, "local_batch_size": 1, "seed": 7}
    return GlobalBatchLoader(
        dataset, collate_fn=PadCollator(0), dp_rank=dp_rank, dp_size=dp_size, **settings | options
    )


def train(loader: GlobalBatchLoader, steps: int) -> list[GlobalBatch]:
    """Take *steps* global batches, over as many epochs as it needs."""
    seen: list[GlobalBatch] = []
    while len(seen) < steps:
        for batch in loader:
            loader.mark_consumed(batch)
            seen.append(batch)
            if len(seen) == steps:
                break
    return seen


def labeled(tokenizer: Any, sample: dict[str, list[int]]) -> list[str]:
    """The text of each uninterrupted run of labels."""
    runs: list[list[int]] = [[]]
    for label in sample["labels"]:
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]
