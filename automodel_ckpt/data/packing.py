"""Several samples in one row: packs of the whole data set, and rows of a micro-batch without padding.

In both, ``position_ids`` restart at 0 with each sample. transformers' attention derives the sample boundaries from them
(if there is no ``attention_mask``), and flash attention its cumulative lengths.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from automodel_ckpt.data.collate import IGNORE_INDEX, check_unpadded
from automodel_ckpt.errors import RecipeError

_Lengths = npt.NDArray[np.int64]
IS_TOKEN = "is_token"  # noqa: S105
"""The key of a mask [B, T] in rows that have places without a token, where the model gets no attention mask."""
_ROWS_OF_TOKENS = {"input_ids", "attention_mask", "labels", "position_ids"}


def best_fit_decreasing(lengths: Sequence[int] | _Lengths, size: int) -> list[list[int]]:
    """Assign items to packs of at most *size*, and return the indices of the items in each pack; no item may be longer.

    The items are taken from the longest to the shortest (equal ones in order), and each goes to the fullest pack that
    has room. Source: D. S. Johnson, "Near-optimal bin packing algorithms", 1973.
    """
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> packs
    rooms: list[int] = []  # the keys of with_room, ascending
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for item in order.tolist():
        length = int(lengths[item])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            packs.append([item])
            _give_room(rooms, with_room, size - length, len(packs) - 1)
            continue
        room = rooms[place]
        pack = with_room[room].pop()
        if not with_room[room]:
            del with_room[room], rooms[place]
        packs[pack].append(item)
        _give_room(rooms, with_room, room - length, pack)
    return packs


def _give_room(rooms: list[int], with_room: dict[int, list[int]], room: int, pack: int) -> None:
    if room == 0:
        return
    if room not in with_room:
        with_room[room] = []
        bisect.insort(rooms, room)
    with_room[room].append(pack)


class PackedDataset:
    """Map-style: sample i is a pack of samples of *dataset*, ``{"input_ids", "labels", "position_ids"}``.

    The packs are a function of the samples' lengths and *size* alone: no seed, epoch or number of ranks changes them.
    A sample's first token has no label, since nothing of its own precedes it. Raises :class:`RecipeError` for an
    iterable data set and for a sample of more than *size* tokens.
    """

    draws_nothing = True

    def __init__(self, dataset: Any, size: int) -> None:
        self.dataset = dataset
        self.identity = getattr(dataset, "identity", None)
        self.size = size
        lengths = _lengths(dataset)
        num_too_long = int((lengths > size).sum())
        if num_too_long:
            percentile = np.percentile(lengths, 99, method="higher")
            raise RecipeError(
                "a sample is longer than a pack",
                where="packed_sequence.size",
                value=f"{num_too_long} of {len(lengths)} samples; size {size}, the longest, sample {lengths.argmax()}, "
                f"has {lengths.max()} tokens, the 99th percentile is {percentile}",
                hint=f"set packed_sequence.size to at least {lengths.max()}, or dataset.seq_length to at most {size}",
            )
        self.packs = best_fit_decreasing(lengths, size)
        self.num_tokens = int(lengths.sum())

    @property
    def waste(self) -> float:
        """The fraction of all packs that is empty, from 0 to 1."""
        if not self.packs:
            return 0.0
        capacity = len(self.packs) * self.size
        return 1 - self.num_tokens / capacity

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        pack: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for number in self.packs[index]:
            sample = self.dataset[number]
            check_unpadded(sample)
            pack["input_ids"] += sample["input_ids"]
            pack["labels"] += [IGNORE_INDEX, *sample["labels"][1:]]
            pack["position_ids"] += range(len(sample["input_ids"]))
        return pack


def _lengths(dataset: Any) -> _Lengths:
    known = getattr(dataset, "lengths", None)
    if known is not None:
        return np.asarray(known, dtype=np.int64)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RecipeError(
            "an iterable data set cannot be packed: packing requires the lengths of all samples",
            where="packed_sequence",
            value=type(dataset).__name__,
            hint="remove packed_sequence, or use a data set with a length",
        )
    return np.fromiter((len(dataset[i]["input_ids"]) for i in range(len(dataset))), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a micro-batch of samples becomes the rows of one forward pass, for a model that keeps samples apart.

    *one_row*: all samples in one row, as flash attention wants them, unless none is padded. Otherwise the cheapest is
    taken: a row each, the longest sample's length shared by several, or one row, by the products that a layer of
    *hidden_size* computes (24 hidden_size**2 per token, 4 hidden_size per token and row position). *multiple* rounds
    lengths up. *marks_tokens* adds the mask :data:`IS_TOKEN` where some places have no token.
    """

    hidden_size: int
    one_row: bool = False
    multiple: int = 1
    marks_tokens: bool = False

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The rows of *batch*, int64 tensors of shape (batch, length): padded rows or packs, as collated.

        Without padding it is returned as it is but for its mask, with tensors of other kinds just as it is. The sums of
        losses over labels stay the same.
        """
        if not {"input_ids", "labels", "attention_mask"} <= batch.keys() <= _ROWS_OF_TOKENS:
            return dict(batch)
        if "position_ids" in batch and not self.one_row:
            return self._without_mask(batch)
        mask = batch["attention_mask"].numpy()
        width = batch["labels"].shape[1]
        fits = not self.one_row or ("position_ids" not in batch and width % self.multiple == 0)
        if fits and np.count_nonzero(mask) == mask.size:
            # A mask that hides nothing costs time in each forward pass, and so does dividing one row into its samples.
            return self._without_mask(batch)
        lengths = mask.sum(1).tolist()
        rows, length = self._cheapest(lengths, width)
        if rows is None:
            return dict(batch)
        return _laid_out(batch, rows, length, self.marks_tokens)

    def _without_mask(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        mask = batch["attention_mask"]
        if self.marks_tokens and not bool(mask.all()):
            rows[IS_TOKEN] = mask
        return rows

    def _cheapest(self, lengths: list[int], width: int) -> tuple[list[list[int]] | None, int]:
        """The samples of each row (None: one sample per row) and the row length with the lowest cost."""
        total = self._rounded(sum(lengths))
        one_row = [list(range(len(lengths)))]
        if self.one_row:
            return one_row, total
        shared = best_fit_decreasing(lengths, width)
        choices: list[tuple[int, list[list[int]] | None, int]] = [
            (self._cost(len(lengths), width), None, width),
            (self._cost(len(shared), width), shared, width),
            (self._cost(1, total), one_row, total),
        ]
        _, rows, length = min(choices, key=lambda choice: choice[0])
        return rows, length

    def _cost(self, num_rows: int, length: int) -> int:
        return num_rows * length * (6 * self.hidden_size + length)

    def _rounded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


def longest_sample(batch: Mapping[str, torch.Tensor]) -> int:
    """The length of the longest sample of a collated micro-batch, including padding if it has one sample per row."""
    positions = batch.get("position_ids")
    return batch["labels"].shape[1] if positions is None else int(positions.max()) + 1


def _laid_out(
    batch: Mapping[str, torch.Tensor], rows: list[list[int]], length: int, marks_tokens: bool
) -> dict[str, torch.Tensor]:
    """Arrange the samples of a padded *batch* in *rows* of *length* positions; *rows* lists the samples of each row.

    Positions without a token become samples of one token without a label, so nothing attends to them.
    """
    mask = batch["attention_mask"].numpy() != 0
    ends = mask.sum(1).cumsum()
    places = np.split(np.flatnonzero(mask), ends[:-1])
    taken = np.full((len(rows), length), -1, dtype=np.int64)
    for row, numbers in enumerate(rows):
        content = np.concatenate([places[number] for number in numbers])
        taken[row, : len(content)] = content
    positions = batch["position_ids"].numpy() if "position_ids" in batch else mask.cumsum(1) - 1
    labels = np.where(positions == 0, IGNORE_INDEX, batch["labels"].numpy())
    sources = (
        ("input_ids", batch["input_ids"].numpy(), 0),
        ("labels", labels, IGNORE_INDEX),
        ("position_ids", positions, 0),
    )
    is_empty = taken < 0
    laid_out = {}
    for name, source, filler in sources:
        values = source.reshape(-1)[taken]
        laid_out[name] = torch.from_numpy(np.where(is_empty, filler, values))
    if marks_tokens and bool(is_empty.any()):
        laid_out[IS_TOKEN] = torch.from_numpy(~is_empty)
    return laid_out
