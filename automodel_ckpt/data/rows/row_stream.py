"""An iterable data set of rows: read during training, shuffled within blocks, and tokenized when they are used."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from automodel_ckpt.data.batches.sampler import derive_seed, permutation
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    Item,
    Sample,
    State,
)
from automodel_ckpt.data.rows.arguments import at_most, require_range
from automodel_ckpt.data.rows.preparation import Encode
from automodel_ckpt.data.rows.row_files import RecordStream
from automodel_ckpt.data.rows.rows import StreamedRows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.tokenized import TokenizedDataset, TokenizedSample, warn_of_notes
from automodel_ckpt.data.samples.truncation import Truncation

log = logging.getLogger(__name__)

_Placed = tuple[Item, str | None]
"""A row, and its file and line if they are known."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it was read, its number from 0 in the stream, and its file and line if they are known."""

    number: int
    content: Item
    place: str | None = None


class RowStream(IterableDataset[Row]):
    """Iterates over *rows*, a stream of a :class:`Source`, shuffled within blocks of *block* rows; its state is exact.

    The state is the state of *rows* at the start of the block and the number of rows yielded since, so a resume reads
    less than one block again, and continues in the same order. :meth:`prepare` tokenizes a row; each rank calls it
    only for its own part of the stream. Raises :class:`RecipeError` if *block* is less than 1.
    """

    identity: str | None = None
    """A digest that changes with the samples, as far as is known without reading them; None if unknown."""
    template: str | None = None
    """How conversations are rendered, in words; None for other samples."""

    def __init__(
        self,
        rows: Any,
        encode: Encode,
        policy: Truncation,
        source: Source,
        block: int,
        kind: type[TokenizedDataset] = TokenizedDataset,
    ) -> None:
        require_range("shuffle_block", block, 1)
        self.rows = rows
        self.encode = encode
        self.policy = policy
        self.source = source
        self.block = block
        self.kind = kind
        self._start = rows.state_dict()
        self._block_start = self._start
        self._first = 0
        self._given = 0
        self._block_size = block
        self.set_order(0, 0, shuffle=False)

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Set the order of the rows in each block: a function of *seed*, *epoch*, *shuffle* and the block."""
        self._order = (seed, epoch, shuffle)

    def __iter__(self) -> Iterator[Row]:
        # Copied, because the source may change the dictionary that it loads.
        self.rows.load_state_dict(copy.deepcopy(self._block_start))
        rows = iter(self.rows)
        while block := list(islice(rows, self._block_size)):
            order = self._order_of(len(block)).tolist()
            next_block_start = copy.deepcopy(self.rows.state_dict())
            while self._given < len(block):
                number = order[self._given]
                # Counted before the yield: a state that is saved during it is the state after this row.
                self._given += 1
                content, place = block[number]
                yield Row(self._first + number, content, place)
            self._first += len(block)
            self._given = 0
            self._block_start = next_block_start
            self._block_size = self.block
        self._rewind()

    def prepare(self, row: Row) -> Any:
        """Tokenize a row, truncated to seq_length, and make an item of it as *kind* does.

        If truncation leaves no label, all labels are -100. With the policy ``error``, raises :class:`RecipeError` for a
        sample that is too long.
        """
        samples = self.samples_of(row)
        items = [with_labels(sample) for sample in samples]
        return self.kind.item(items, samples[0].number, self.policy.limit)

    def samples_of(self, row: Row) -> list[TokenizedSample]:
        """Tokenize and truncate the samples of a row. They have no labels if one of them has none left."""
        place = row.place or f"{self.source.path}, row {row.number}"
        table = StreamedRows(self.source.path, [(row.content, place)], self.rows.fields)
        samples = self.encode(table)
        truncated = self.policy.apply(samples, lambda: table.place(0))
        if truncated:
            return truncated
        # A stream cannot skip a sample: the number of the samples after it is part of the data order.
        without_labels = []
        for sample in samples:
            tokens = sample.tokens[: self.policy.seq_length]
            labelled = [False] * len(tokens)
            without_labels.append(sample._replace(tokens=tokens, labelled=labelled))
        return without_labels

    def report(self) -> None:
        """Log how many samples were truncated or have an empty completion since the last call."""
        policy = self.policy
        if policy.num_empty:
            log.warning(
                "%s: of the samples that this rank prepared, %d have an empty completion: "
                "only the end token is trained on",
                self.source.path,
                policy.num_empty,
            )
        warn_of_notes(
            f"{self.source.path}, as far as this rank read it", policy.notes, policy.num_used
        )
        if policy.num_cut or policy.num_left_out:
            log.warning(
                "%s: of the samples that this rank prepared, %d were truncated to seq_length %d, "
                "%d more have no label left",
                *(self.source.path, policy.num_cut, policy.seq_length, policy.num_left_out),
            )
        policy.num_cut = policy.num_left_out = policy.num_empty = 0
        policy.num_used = 0
        policy.notes.clear()

    def state_dict(self) -> State:
        return {
            "rows": self._block_start,
            "first": self._first,
            "given": self._given,
            "block": self._block_size,
        }

    def load_state_dict(self, state: State) -> None:
        self._block_start = state["rows"]
        self._first = state["first"]
        self._given = state["given"]
        # The interrupted block keeps its size, also if the recipe's shuffle_block has changed.
        self._block_size = state["block"]
        if isinstance(self.rows, RecordStream) and self._block_start.keys() != self._start.keys():
            # Saved by a version that read these files with the library datasets: its state has another format.
            self._block_start = self.rows.state_after(self._first)

    def _rewind(self) -> None:
        self._block_start = self._start
        self._first = 0
        self._given = 0
        self._block_size = self.block

    def _order_of(self, num_rows: int) -> Any:
        seed, epoch, shuffle = self._order
        # Seeded by the block's first row, so that a resume needs no earlier block.
        return permutation(num_rows, derive_seed(seed, self._first), epoch, shuffle)


def with_labels(sample: TokenizedSample) -> Sample:
    """Make ``{"input_ids": list[int], "labels": list[int]}`` of a sample."""
    labels = []
    for token, is_labeled in zip(sample.tokens, sample.labelled, strict=True):
        labels.append(token if is_labeled else IGNORE_INDEX)
    return {"input_ids": sample.tokens, "labels": labels}


def row_stream(
    source: Source,
    encode: Encode,
    policy: Truncation,
    *,
    block: int,
    max_samples: int | None,
    kind: type[TokenizedDataset] = TokenizedDataset,
) -> RowStream:
    """Make a stream of at most *max_samples* rows of *source*.

    Logs how samples that are too long are handled, because their number is not known in advance.
    """
    rows = source.stream()
    if max_samples is not None:
        rows = rows.take(at_most(max_samples, max_samples))
    handlings = {"error": "rejected", "right": "truncated"}
    handling = handlings.get(policy.policy, "used without labels")
    if policy.limit is not None:
        log.info(
            "streaming %s: samples of more than %d tokens are %s when they are read; their number is not known in "
            "advance",
            source.path,
            policy.seq_length,
            handling,
        )
    return RowStream(rows, encode, policy, source, block, kind)
