"""Put several samples into one row: packs of the whole data set, and rows of a micro-batch without padding.

In both, ``position_ids`` restart at 0 with each sample. transformers' attention derives the sample boundaries from them
(if there is no ``attention_mask``), and flash attention its cumulative lengths. Row lengths can be rounded up to a few
widths, because torch.compile and CUDA graphs specialize on the shapes of rows.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    Batch,
    Ids,
    Integers,
    Sample,
    Tensors,
    check_unpadded,
    require_keys,
)
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

Packs = list[Ids]
"""The numbers of the samples in each pack, or in each row."""
IS_TOKEN = "is_token"  # noqa: S105
"""Key of a mask [B, T] that shows which positions of a row have a token that counts.

Rows of several samples have it in place of an attention mask. If there is also an attention mask, it leaves out further
tokens: the tokens of blank images. It is no argument of models.
"""
_ROWS_OF_TOKENS = {"input_ids", "attention_mask", "labels", "position_ids"}


def best_fit_decreasing(lengths: Sequence[int] | Integers, size: int) -> Packs:
    """Assign items to packs of at most *size*, and return the indices of the items in each pack.

    The items are taken from the longest to the shortest (equal ones in order), and each is put into the fullest pack
    that fits it. No item may be longer than *size*. Source: D. S. Johnson, "Near-optimal bin packing algorithms", 1973.
    """
    packs: Packs = []
    by_space: dict[int, Ids] = {}
    """Free space -> the packs with it. Finding the fullest that fits takes logarithmic time."""
    spaces: Ids = []  # the keys of by_space, ascending
    # Stable: all ranks and every resume must make the same packs of samples of equal length.
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for item in order.tolist():
        length = int(lengths[item])
        index = bisect.bisect_left(spaces, length)
        if index == len(spaces):
            pack, space = len(packs), size
            packs.append([])
        else:
            space = spaces[index]
            pack = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[index]
        packs[pack].append(item)
        rest = space - length
        if rest and rest not in by_space:
            by_space[rest] = []
            bisect.insort(spaces, rest)
        if rest:
            by_space[rest].append(pack)
    return packs


class PackedDataset:
    """A map-style data set in which sample i is a pack of samples: ``{"input_ids", "labels", "position_ids"}``.

    The packs depend only on the samples' lengths and *size*, not on a seed, the epoch or the number of ranks. The first
    token of a sample has no label, because no token of the sample precedes it. With *attends_across*, a pack is one
    sequence: it has no ``position_ids``, and these tokens keep their labels. Raises :class:`RecipeError` for an
    iterable data set and for a sample of more than *size* tokens; *hint* is what the error proposes about such samples.
    """

    draws_nothing = True

    def __init__(
        self, dataset: Any, size: int, *, attends_across: bool = False, hint: str = ""
    ) -> None:
        self.dataset = dataset
        self.attends_across = attends_across
        self.identity = getattr(dataset, "identity", None)
        self.size = size
        lengths = lengths_of(dataset)
        num_too_long = int((lengths > size).sum())
        if num_too_long:
            hint = hint or f"set dataset.seq_length to at most {size}"
            raise RecipeError(
                "a sample is longer than a pack",
                where="packed_sequence.size",
                value=f"{num_too_long} of {len(lengths)} samples; size {size}, the longest, sample {lengths.argmax()}, "
                f"has {lengths.max()} tokens",
                hint=f"{hint}, or packed_sequence.size to at least {lengths.max()}",
            )
        self.packs = best_fit_decreasing(lengths, size)
        self.num_tokens = int(lengths.sum())
        log.info(
            "packed %s into %s of %s, %.2f%% of them empty",
            counted(len(lengths), "sample"),
            counted(len(self.packs), "pack"),
            counted(size, "token"),
            100 * self.waste,
        )

    @property
    def waste(self) -> float:
        """The fraction of all packs that is empty, from 0 to 1."""
        return 1 - self.num_tokens / (len(self.packs) * self.size) if self.packs else 0.0

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Sample:
        pack: Sample = {"input_ids": [], "labels": []}
        if not self.attends_across:
            pack["position_ids"] = []
        for number in self.packs[index]:
            sample = self.dataset[number]
            check_unpadded(sample)
            pack["input_ids"] += sample["input_ids"]
            if self.attends_across:
                pack["labels"] += sample["labels"]
            else:
                pack["labels"] += [IGNORE_INDEX, *sample["labels"][1:]]
                pack["position_ids"] += range(len(sample["input_ids"]))
        return pack


def check_has_length(dataset: Any) -> None:
    """Raise :class:`RecipeError` for an iterable data set, which cannot be packed."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RecipeError(
            "an iterable data set cannot be packed: packing requires the lengths of all samples",
            where="packed_sequence",
            value=type(dataset).__name__,
            hint="remove packed_sequence, or use a data set with a length",
        )


def lengths_of(dataset: Any) -> Integers:
    """The number of tokens of each sample of a map-style *dataset*.

    Raises :class:`RecipeError` for other data sets, and for samples without tokens or labels.
    """
    known = getattr(dataset, "lengths", None)
    if known is None:
        check_has_length(dataset)
        known = []
        for number in range(len(dataset)):
            sample = dataset[number]
            require_keys(sample, "input_ids", "labels")
            known.append(len(sample["input_ids"]))
    return np.asarray(known, dtype=np.int64)


@dataclass(frozen=True)
class RowLayout:
    """Arranges a micro-batch of samples in the rows of one forward pass, for a model that separates samples in a row.

    With *one_row*, all samples are in one row, which flash attention requires, unless none is padded and
    *unpadded_length* is their length or None. Otherwise the cheapest of three layouts is used: one sample per row,
    several samples per row of the longest sample's length, or one row. The cost is the number of multiplications in a
    layer of *hidden_size*: 24 hidden_size**2 per token, and 4 hidden_size per token and position of its row.
    *multiple* rounds row lengths up. *marks_tokens* adds the mask :data:`IS_TOKEN` if some positions have no token.
    """

    hidden_size: int
    one_row: bool = False
    multiple: int = 1
    marks_tokens: bool = False
    unpadded_length: int | None = None

    def __call__(self, batch: Tensors) -> Batch:
        """Arrange *batch*, int64 tensors of shape [samples, length]: padded samples or packs.

        Returns tensors of shape [rows, row length]. A batch without padding is only returned without its mask, and a
        batch with other tensors is returned unchanged. The sum of the losses over the labels does not change.
        """
        if not {"input_ids", "labels", "attention_mask"} <= batch.keys() <= _ROWS_OF_TOKENS:
            return dict(batch)
        mask = batch["attention_mask"].numpy()
        width = batch["labels"].shape[1]
        is_packed = "position_ids" in batch
        keeps_rows = not self.one_row or (
            not is_packed and width % self.multiple == 0 and self.unpadded_length in (None, width)
        )
        if keeps_rows and (is_packed or mask.all()):
            # A mask that hides nothing costs time in each forward pass, and so does separating the samples of one row.
            unmasked = {name: batch[name] for name in batch if name != "attention_mask"}
            if self.marks_tokens and not mask.all():
                unmasked[IS_TOKEN] = batch["attention_mask"]
            return unmasked
        lengths = mask.sum(1).tolist()
        total = -(-sum(lengths) // self.multiple) * self.multiple
        layouts: list[tuple[Packs, int]] = [([list(range(len(lengths)))], total)]
        if not self.one_row:
            apart = [[number] for number in range(len(lengths))]
            # Of equal costs, the first one.
            layouts = [(apart, width), (best_fit_decreasing(lengths, width), width), *layouts]
        # The cost of the class docstring, divided by 4 * hidden_size.
        costs = [len(rows) * length * (6 * self.hidden_size + length) for rows, length in layouts]
        rows, length = layouts[costs.index(min(costs))]
        if len(rows) == len(lengths) and length == width and not self.one_row:
            return dict(batch)
        return laid_out(batch, rows, length, self.marks_tokens)


def tokens_of_rows(mask: npt.NDArray[np.bool_], rows: Packs, length: int) -> Integers:
    """Find which token of a padded batch comes to which position of rows that several samples share.

    *mask* [samples, L] is true for tokens; *rows* lists the samples of each row. Returns for each position of the rows,
    [rows, length], the index of its token in the flattened batch, or -1 if it has none.
    """
    ends = mask.sum(1).cumsum()
    # The index of each token in the flattened batch, by sample.
    tokens_of = np.split(np.flatnonzero(mask), ends[:-1])
    taken = np.full((len(rows), length), -1, dtype=np.int64)
    for row, numbers in enumerate(rows):
        content = np.concatenate([tokens_of[number] for number in numbers])
        taken[row, : len(content)] = content
    return taken


def gathered(source: npt.NDArray[Any], taken: Integers, filler: int) -> torch.Tensor:
    """Arrange the values of *source* [samples, L] by *taken* of :func:`tokens_of_rows`; *filler* where it has none."""
    values = source.reshape(-1)[taken]
    return torch.from_numpy(np.where(taken < 0, np.array(filler, dtype=source.dtype), values))


def laid_out(batch: Tensors, rows: Packs, length: int, marks_tokens: bool) -> Batch:
    """Arrange the samples of a padded *batch* in *rows* of *length* positions; *rows* lists the samples of each row.

    The tensors with a value for each token become [rows, length], without ``attention_mask``; others stay as they are.
    Positions without a token become samples of one token without a label, so nothing attends to them.
    """
    mask = batch["attention_mask"].numpy() != 0
    taken = tokens_of_rows(mask, rows, length)
    positions = mask.cumsum(1) - 1
    if "position_ids" in batch:
        positions = batch["position_ids"].numpy()
    arranged = {"position_ids": gathered(positions, taken, 0)}
    for name, tensor in batch.items():
        if name in ("attention_mask", "position_ids"):
            continue
        arranged[name] = tensor
        if name == "labels":
            # The first token of a sample has no label, because the token before it belongs to another sample.
            labels = np.where(positions == 0, IGNORE_INDEX, tensor.numpy())
            arranged[name] = gathered(labels, taken, IGNORE_INDEX)
        elif tensor.shape == mask.shape and not tensor.is_floating_point():
            arranged[name] = gathered(tensor.numpy(), taken, 0)
    is_empty = taken < 0
    if marks_tokens and bool(is_empty.any()):
        # The mask of a batch leaves out further positions.
        arranged.setdefault(IS_TOKEN, torch.from_numpy(~is_empty))
    return arranged


_SPAN = 16
"""The largest width of a grid divided by the smallest."""
_FILLERS = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0, IS_TOKEN: 0}
_WIDENED = {*_FILLERS, "position_ids"}


@dataclass(frozen=True)
class RowWidths:
    """Rounds the lengths of rows up to at most *count* widths, the largest of which is *longest*.

    The widths are a geometric sequence from *longest* / 16, so that the padding of long and of short rows is the same
    fraction. All are multiples of *multiple*. Longer rows continue the sequence. The result depends on the length only,
    not on earlier rows, so a resumed run has the same widths.
    """

    longest: int
    count: int
    multiple: int = 1

    @property
    def widths(self) -> Ids:
        """The widths, ascending."""
        powers = [self._ratio**number for number in range(self.count)]
        return sorted({self._rounded(self.longest / power) for power in powers})

    def __call__(self, length: int) -> int:
        """The width of a row of *length* tokens."""
        widths = self.widths
        while widths[-1] < length:
            width = widths[-1]
            widths.append(self._rounded(max(width * self._ratio, width + self.multiple)))
        return widths[bisect.bisect_left(widths, length)]

    @property
    def _ratio(self) -> float:
        return float(_SPAN ** (1 / max(self.count - 1, 1)))

    def _rounded(self, width: float) -> int:
        # Without the subtraction, rounding errors of the powers would add a multiple.
        num_multiples = -(-(width - 1e-6) // self.multiple)
        return max(int(num_multiples), 1) * self.multiple


@dataclass(frozen=True)
class WidenedRows:
    """Arranges a micro-batch with *layout* (None: it is padded already), and pads the rows to the next width.

    In rows that samples share, the added tokens are separate samples, no longer than the longest one, without labels.
    In other rows, they are hidden by the attention mask. The sum of the losses over the labels does not change.

    Rows of one sample each that have *unpadded_length* tokens stay as they are, without a mask. The widths are for rows
    that several samples share, which are longer. The sample's length need not be one of them.
    """

    layout: Callable[[Tensors], Batch] | None
    widths: RowWidths
    unpadded_length: int | None = None

    def __call__(self, batch: Tensors) -> Batch:
        """Arrange *batch*; rows with other tensors than tokens, labels, masks and positions are not padded."""
        rows = dict(batch) if self.layout is None else self.layout(batch)
        is_text = {"input_ids", "labels"} <= rows.keys() <= _WIDENED
        if not is_text or any(tensor.ndim != 2 for tensor in rows.values()):
            return rows
        length = rows["labels"].shape[1]
        if length == self.unpadded_length and not {"position_ids", "attention_mask"} & rows.keys():
            return rows
        num_added = self.widths(length) - length
        return _padded(rows, num_added) if num_added else rows


def _padded(rows: Tensors, num_added: int) -> Batch:
    """Append *num_added* positions to each of *rows*, tensors [rows, T]."""
    labels = rows["labels"]
    padded = dict(rows)
    if "position_ids" not in padded and "attention_mask" not in padded:
        padded["attention_mask"] = torch.ones_like(labels)
    if "attention_mask" not in padded and IS_TOKEN not in padded:
        # Routers must not count the added tokens.
        padded[IS_TOKEN] = torch.ones_like(labels, dtype=torch.bool)
    for name, filler in _FILLERS.items():
        if name in padded:
            added = padded[name].new_full((len(labels), num_added), filler)
            padded[name] = torch.cat([padded[name], added], dim=1)
    positions = padded.get("position_ids")
    if positions is not None:
        # Longer than every sample, they could exceed the model's context.
        longest = int(positions.max()) + 1
        added = torch.arange(num_added, dtype=positions.dtype) % longest
        padded["position_ids"] = torch.cat([positions, added.expand(len(labels), -1)], dim=1)
    return padded
