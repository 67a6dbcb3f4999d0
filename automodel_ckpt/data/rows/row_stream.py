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
    State,
)
from automodel_ckpt.data.rows.arguments import at_most, require_range
from automodel_ckpt.data.rows.preparation import Encode
from automodel_ckpt.data.rows.row_files import RecordStream
from automodel_ckpt.data.rows.rows import ColumnRows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.tokenized import TokenizedDataset, Truncation, report_counts

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
    """Iterates over at most *max_samples* rows of *source*, shuffled within blocks of *block* rows; its state is exact.

    Logs how samples that are too long are handled, because their number is not known in advance.

    The state is the state of :attr:`rows` at the start of the block and the number of rows yielded since. So a resume
    reads less than one block again, and continues in the same order. :meth:`prepare` tokenizes a row; each rank calls
    it only for its own part of the stream. Raises :class:`RecipeError` if *block* is less than 1.
    """

    identity: str | None = None
    """A digest that changes with the samples, as far as is known without reading them. None when unknown."""
    template: str | None = None
    """How conversations are rendered, in words; None for other samples."""

    def __init__(
        self,
        source: Source,
        encode: Encode,
        policy: Truncation,
        *,
        block: int,
        max_samples: int | None,
        kind: type[TokenizedDataset] = TokenizedDataset,
    ) -> None:
        require_range("shuffle_block", block, 1)
        self.rows: Any = source.stream()
        if max_samples is not None:
            self.rows = self.rows.take(at_most(max_samples, max_samples))
        self.encode, self.policy, self.source = encode, policy, source
        self.block, self.kind = block, kind
        rows = self.rows.state_dict()
        self._start: State = {"rows": rows, "first": 0, "given": 0, "block": block}
        self._state = dict(self._start)
        self.set_order(0, 0, shuffle=False)
        handlings = {"error": "rejected", "right": "truncated"}
        if policy.limit is not None:
            log.info(
                "streaming %s: samples of more than %d tokens are %s when they are read; their number is not known in "
                "advance",
                source.path,
                policy.seq_length,
                handlings.get(policy.policy, "used without labels"),
            )

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Set the order of the rows in each block: a function of *seed*, *epoch*, *shuffle* and the block."""
        self._order = (seed, epoch, shuffle)

    def __iter__(self) -> Iterator[Row]:
        state = self._state
        # Copied, because the source may change the dictionary that it loads.
        self.rows.load_state_dict(copy.deepcopy(state["rows"]))
        rows = iter(self.rows)
        while block := list(islice(rows, state["block"])):
            seed, epoch, shuffle = self._order
            # Seeded by the block's first row, so that a resume needs no earlier block.
            seed = derive_seed(seed, state["first"])
            order = permutation(len(block), seed, epoch, shuffle).tolist()
            next_start = copy.deepcopy(self.rows.state_dict())
            while state["given"] < len(block):
                number = order[state["given"]]
                # Counted before the yield: a state that is saved during it is the state after this row.
                state["given"] += 1
                content, place = block[number]
                yield Row(state["first"] + number, content, place)
            first = state["first"] + len(block)
            state.update(rows=next_start, first=first, given=0, block=self.block)
        self._state = dict(self._start)

    def prepare(self, row: Row) -> Any:
        """Tokenize a row, truncated to seq_length, and make an item of it as *kind* does.

        If truncation leaves no label, all labels are -100. With the policy ``error``, raises :class:`RecipeError` for a
        sample that is too long.
        """
        place = row.place or f"{self.source.path}, row {row.number}"
        table = ColumnRows.of(self.source.path, [(row.content, place)], self.rows)
        samples = self.encode(table)
        kept = self.policy.apply(samples, lambda: table.place(0))
        items = []
        for sample in kept or samples:
            tokens, flags = sample.tokens, sample.labelled
            if not kept:
                # A stream cannot skip a sample: the number of the samples after it is part of the data order.
                tokens = tokens[: self.policy.seq_length]
                flags = [False] * len(tokens)
            pairs = zip(tokens, flags, strict=True)
            labels = [token if is_labeled else IGNORE_INDEX for token, is_labeled in pairs]
            items.append({"input_ids": tokens, "labels": labels})
        return self.kind.item(items, samples[0].number, self.policy.limit)

    def report(self) -> None:
        """Log how many samples were truncated or have an empty completion since the last call."""
        what = f"{self.source.path}, as far as this rank read it"
        policy = self.policy
        limit = f"seq_length {policy.seq_length}"
        report_counts(what, policy.counts, policy.num_seen, policy.notes, limit)
        self.policy = policy.anew()

    def state_dict(self) -> State:
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        # The interrupted block keeps its size, also if the recipe's shuffle_block has changed.
        self._state = dict(state)
        start = self._start["rows"]
        if isinstance(self.rows, RecordStream) and state["rows"].keys() != start.keys():
            # Saved by a version that read these files with the library datasets: its state has another format.
            self._state["rows"] = self.rows.state_after(state["first"])
