"""Documents in rows of a fixed number of tokens, and one lane of a packed stream: some of its documents in such rows.

Rows have whole documents, or divide a stream of tokens. A row that a document continues from the row before repeats its
last token there, so that each token is predicted once. A lane has an exact state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.batches.micro_batches import permutation
from automodel_ckpt.data.batches.packing import best_fit_decreasing, lengths_of
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    State,
    require_index,
)
from automodel_ckpt.data.rows.rows import ColumnRows
from automodel_ckpt.data.samples.samples import RowStream
from automodel_ckpt.errors import RecipeError

Row = dict[str, npt.NDArray[Any]]
"""``input_ids`` and ``labels`` of a row, and ``position_ids`` unless attention crosses documents; each of shape [n]."""


class Document(NamedTuple):
    """The tokens of a document or of a part of one, int32 [n], and whether each has a label, bool [n]."""

    tokens: npt.NDArray[np.int32]
    labelled: npt.NDArray[np.bool_]

    def part(self, start: int, stop: int) -> Document:
        """The tokens *start* to *stop* - 1."""
        return Document(self.tokens[start:stop], self.labelled[start:stop])


@dataclass(frozen=True)
class RowRules:
    """How documents are put into rows of at most *size* tokens.

    With *splits*, rows divide documents, and all rows are full. With *attends_across*, the documents of a row are one
    sequence: a document sees those before it, and its first token is predicted.
    """

    size: int
    splits: bool = False
    attends_across: bool = False

    def row(self, documents: Iterable[Document]) -> Row:
        """Concatenate *documents* to a row.

        Unless attention crosses documents, positions restart with each document, and its first token has no label.
        """
        tokens, labels, positions = [], [], []
        for document in documents:
            own = np.where(document.labelled, document.tokens, IGNORE_INDEX).astype(np.int64)
            if not self.attends_across:
                own[0] = IGNORE_INDEX
                positions.append(np.arange(len(own)))
            tokens.append(document.tokens)
            labels.append(own)
        row: Row = {"input_ids": np.concatenate(tokens), "labels": np.concatenate(labels)}
        if positions:
            row["position_ids"] = np.concatenate(positions)
        return row

    def rows(
        self, documents: Sequence[Document], order: Callable[[int], Sequence[int]]
    ) -> tuple[list[Row], list[Document]]:
        """Return the rows of *documents*, and what is left: the documents of a row that is not full yet.

        What is left goes before the documents of the next call. *order* permutes the rows of whole documents, which
        packing sorts by length; it gets their number. No document may be longer than a row unless rows divide them.
        """
        if not self.splits:
            return self._whole(documents, order)
        if self.attends_across:
            documents = [Document(*map(np.concatenate, zip(*documents, strict=True)))]
        rows, left = self._divided(documents)
        if self.attends_across and not left:
            # The first token of the next document is predicted from the last one of the row.
            length = len(documents[0].tokens)
            left = [documents[0].part(length - 1, length)]
        return rows, left

    def _whole(
        self, documents: Sequence[Document], order: Callable[[int], Sequence[int]]
    ) -> tuple[list[Row], list[Document]]:
        lengths = [len(document.tokens) for document in documents]
        packs = best_fit_decreasing(lengths, self.size)
        if not packs:
            return [], []
        filled = [sum(lengths[number] for number in pack) for pack in packs]
        emptiest = filled.index(min(filled))
        left = packs.pop(emptiest)
        rows = [self.row(documents[item] for item in packs[number]) for number in order(len(packs))]
        return rows, [documents[item] for item in sorted(left)]

    def _divided(self, documents: Sequence[Document]) -> tuple[list[Row], list[Document]]:
        rows: list[Row] = []
        parts: list[Document] = []
        free = self.size
        for document in documents:
            start, length = 0, len(document.tokens)
            while True:
                end = min(start + free, length)
                parts.append(document.part(start, end))
                free -= end - start
                if free == 0:
                    rows.append(self.row(parts))
                    parts, free = [], self.size
                if end == length:
                    break
                start = end - 1
        return rows, parts


class DocumentRows:
    """A map-style data set of rows that divide the documents of *dataset*, a map-style data set of samples.

    The documents are one sequence in the order of *dataset*, of which row i has the *size* tokens from
    ``i * (size - 1)`` on; the last row may be shorter. Rows depend only on the lengths of the samples, so a row is read
    without the rows before it.
    """

    draws_nothing = True

    def __init__(self, dataset: Any, rules: RowRules) -> None:
        self.dataset = dataset
        self.rules = rules
        self.identity = getattr(dataset, "identity", None)
        self._ends = np.cumsum(lengths_of(dataset), dtype=np.int64)
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        # A last row of one token would predict nothing.
        return -(-max(self.num_tokens - 1, 0) // (self.rules.size - 1))

    def __getitem__(self, index: int) -> Row:
        require_index(index, len(self))
        start = index * (self.rules.size - 1)
        stop = min(start + self.rules.size, self.num_tokens)
        parts = []
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        for number in range(first, last + 1):
            before = int(self._ends[number - 1]) if number else 0
            sample = self.dataset[number]
            is_labelled = np.asarray(sample["labels"]) != IGNORE_INDEX
            document = Document(np.asarray(sample["input_ids"], np.int32), is_labelled)
            part = document.part(max(start - before, 0), stop - before)
            if len(part.tokens):
                parts.append(part)
        return self.rules.row(parts)


ROWS_PER_BLOCK = 32
"""A lane packs so many rows at a time. More waste less of the rows, and a resume tokenizes up to so many again."""
_DOCUMENTS_PER_CALL = 64
"""Documents that are tokenized in one call of the tokenizer."""


class Lane:
    """The rows of lane *lane*, (number, count), of a stream of documents, which is read again and again.

    They are packed in blocks of at least :data:`ROWS_PER_BLOCK` rows and of as many documents as are shuffled together.
    The state is the position of the block in the documents, the documents that were left of the block before, and the
    number of rows that were taken. A block is a function of the state at its start. *name* is the name in a mixture.
    """

    def __init__(
        self,
        stream: RowStream,
        name: str,
        lane: tuple[int, int],
        rules: RowRules,
        seed: int,
        *,
        shuffle: bool,
        state: State | None,
    ) -> None:
        self._stream, self._name, self._lane = stream, name, lane
        self._rules, self._seed, self._shuffle = rules, seed, shuffle
        self._source = stream.rows.lane(*lane)
        self._beginning = copy.deepcopy(self._source.state_dict())
        self._iterator: Iterator[Any] | None = None
        self._has_some = state is not None
        self._rows: list[Row] = []
        self._left: list[Document] = []
        self._state: State = {
            "documents": self._beginning,
            "left": _arrays_of([]),
            "block": 0,
            "num_documents": max(stream.block // lane[1], 1),
            "taken": 0,
        }
        if state is not None:
            # The block that was interrupted keeps its size, also if the recipe's shuffle_block has changed.
            self._state = dict(state)
            self._source.load_state_dict(copy.deepcopy(state["documents"]))
            self._left = _documents_in(state["left"])
            if state["taken"]:
                self._read_block()
                self._state["taken"] = state["taken"]

    def next(self) -> Row:
        """The next row."""
        state = self._state
        while state["taken"] == len(self._rows):
            state["block"] += bool(self._rows)
            self._read_block()
        number: int = state["taken"]
        state["taken"] = number + 1
        return self._rows[number]

    def state_dict(self) -> State:
        """The state after the rows that were taken."""
        return dict(self._state)

    def _read_block(self) -> None:
        left = self._left
        start = {"documents": copy.deepcopy(self._source.state_dict()), "left": _arrays_of(left)}
        self._state.update(start, taken=0)
        read: list[Document] = []
        missing = ROWS_PER_BLOCK * self._rules.size - sum(len(each.tokens) for each in left)
        is_last = False
        while not is_last and (len(read) < self._state["num_documents"] or missing > 0):
            found, is_last = self._read()
            missing -= sum(len(document.tokens) for document in found)
            read += found
        if self._rules.splits:
            # What is left continues in the next row, so it stays first.
            read = [read[number] for number in self._order(len(read))]
        self._rows, self._left = self._rules.rows([*left, *read], self._order)

    def _order(self, count: int) -> Sequence[int]:
        block = self._state["block"]
        order: list[int] = permutation(count, self._seed, block, self._shuffle).tolist()
        return order

    def _read(self) -> tuple[list[Document], bool]:
        """Return some more documents, and whether they are the last before the stream begins again."""
        if self._iterator is None:
            self._iterator = iter(self._source)
        rows = list(islice(self._iterator, _DOCUMENTS_PER_CALL))
        documents = self._tokenized(rows) if rows else []
        self._has_some = self._has_some or bool(documents)
        if len(rows) == _DOCUMENTS_PER_CALL:
            return documents, False
        if not self._has_some:
            number, count = self._lane
            raise RecipeError(
                "a stream has too few documents to divide it among the rows of a global batch",
                where=f"dataset.sources.{self._name}" if self._name else "dataset",
                value=f"part {number + 1} of {count} of {self._stream.source.path} has no document with labels",
                hint="read it without streaming, or use more data or a smaller step_scheduler.global_batch_size",
            )
        self._source.load_state_dict(copy.deepcopy(self._beginning))
        self._iterator = None
        return documents, True

    def _tokenized(self, rows: list[Any]) -> list[Document]:
        stream, rules = self._stream, self._rules
        table = ColumnRows.of(stream.source.path, rows, stream.rows)
        documents = []
        for number, sample in enumerate(stream.encode(table)):
            for truncated in stream.policy.apply([sample], partial(table.place, number)):
                length = len(truncated.tokens)
                if length > rules.size and not rules.splits:
                    raise RecipeError(
                        "a document is longer than a row",
                        where=table.place(number),
                        value=f"{length} tokens, packed_sequence.size {rules.size}",
                        hint="set pretrain.split_documents true, dataset.seq_length to the size of a row with "
                        "dataset.truncation right, or a larger packed_sequence.size",
                    )
                tokens, labelled = truncated.tokens, truncated.labelled
                documents.append(Document(np.array(tokens, np.int32), np.array(labelled, np.bool_)))
        return documents


def _arrays_of(documents: Sequence[Document]) -> State:
    """The documents as arrays, which checkpoints store."""
    tokens = [document.tokens for document in documents]
    labelled = [document.labelled for document in documents]
    return {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "labelled": np.concatenate([np.empty(0, np.bool_), *labelled]),
        "lengths": [len(each) for each in tokens],
    }


def _documents_in(arrays: State) -> list[Document]:
    whole = Document(arrays["tokens"], arrays["labelled"])
    starts = accumulate(arrays["lengths"], initial=0)
    return [whole.part(start, end) for start, end in pairwise(starts)]
