"""Documents in rows of a fixed number of tokens, and one lane of a packed stream: some of its documents in such rows.

Rows have whole documents, or divide a stream of tokens. A row that a document continues from the row before repeats its
last token there, so that each token is predicted once. A lane has an exact state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.batches.packing import best_fit_decreasing, lengths_of
from automodel_ckpt.data.batches.sampler import permutation
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    State,
    Where,
)
from automodel_ckpt.data.rows.row_stream import RowStream
from automodel_ckpt.data.rows.rows import StreamedRows
from automodel_ckpt.errors import RecipeError

Row = dict[str, npt.NDArray[Any]]
"""``input_ids`` and ``labels`` of a row, and ``position_ids`` unless attention crosses documents; each of shape [n]."""


class Document(NamedTuple):
    """The tokens of a document or of a part of one, int32 [n], and whether each has a label, bool [n]."""

    tokens: npt.NDArray[np.int32]
    labelled: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, tokens: Sequence[int], labelled: Sequence[bool]) -> Document:
        """Make a document of lists."""
        return cls(np.array(tokens, np.int32), np.array(labelled, np.bool_))

    def part(self, start: int, stop: int) -> Document:
        """The tokens *start* to *stop* - 1."""
        return Document(self.tokens[start:stop], self.labelled[start:stop])


@dataclass(frozen=True, slots=True)
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
            return self._one_sequence(documents)
        return self._divided(documents)

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
        rows = []
        for number in order(len(packs)):
            rows.append(self.row(documents[item] for item in packs[number]))
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

    def _one_sequence(self, documents: Sequence[Document]) -> tuple[list[Row], list[Document]]:
        whole = Document(
            np.concatenate([document.tokens for document in documents]),
            np.concatenate([document.labelled for document in documents]),
        )
        rows = []
        start = 0
        while start + self.size <= len(whole.tokens):
            rows.append(self.row([whole.part(start, start + self.size)]))
            start += self.size - 1
        return rows, [whole.part(start, len(whole.tokens))]


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
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * (self.rules.size - 1)
        stop = min(start + self.rules.size, self.num_tokens)
        parts = []
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        for number in range(first, last + 1):
            before = int(self._ends[number - 1]) if number else 0
            document = document_of(self.dataset[number])
            part = document.part(max(start - before, 0), stop - before)
            if len(part.tokens):
                parts.append(part)
        return self.rules.row(parts)


def document_of(sample: Any) -> Document:
    """Make a document of a sample with ``input_ids`` and ``labels``."""
    labels = np.asarray(sample["labels"])
    return Document(np.asarray(sample["input_ids"], np.int32), labels != IGNORE_INDEX)


ROWS_PER_BLOCK = 32
"""A lane packs so many rows at a time. More waste less of the rows, and a resume tokenizes up to so many again."""
_DOCUMENTS_PER_CALL = 64
"""Documents that are tokenized in one call of the tokenizer."""


class Lane:
    """The rows of one lane, packed in blocks of at least *num_documents* documents and :data:`ROWS_PER_BLOCK` rows.

    The state is the position of the block in the documents, the documents that were left of the block before, and the
    number of rows that were taken. A block is a function of the state at its start.
    """

    def __init__(
        self,
        documents: LaneDocuments,
        rules: RowRules,
        seed: int,
        num_documents: int,
        *,
        shuffle: bool,
        state: State | None,
    ) -> None:
        self._documents, self._rules, self._seed = documents, rules, seed
        self._num_documents, self._shuffle = num_documents, shuffle
        self._rows: list[Row] = []
        self._left: list[Document] = []
        self._block = 0
        self._taken = 0
        self._start = documents.state_dict()
        self._left_before: list[Document] = []
        if state is not None:
            documents.load_state_dict(state["documents"])
            self._left = _documents_in(state["left"])
            self._block = state["block"]
            # The block that was interrupted keeps its size, also if the recipe's shuffle_block has changed.
            self._num_documents = state["num_documents"]
            self._start, self._left_before = documents.state_dict(), self._left
            if state["taken"]:
                self._read_block()
                self._taken = state["taken"]

    def next(self) -> Row:
        """The next row."""
        while self._taken == len(self._rows):
            self._block += bool(self._rows)
            self._read_block()
        self._taken += 1
        return self._rows[self._taken - 1]

    def state_dict(self) -> State:
        """The state after the rows that were taken."""
        return {
            "documents": self._start,
            "left": _arrays_of(self._left_before),
            "block": self._block,
            "num_documents": self._num_documents,
            "taken": self._taken,
        }

    def _read_block(self) -> None:
        self._start = self._documents.state_dict()
        self._left_before = self._left
        documents = list(self._left)
        wanted = ROWS_PER_BLOCK * self._rules.size
        num_tokens = sum(len(document.tokens) for document in documents)
        num_read = 0
        is_last = False
        while not is_last and (num_read < self._num_documents or num_tokens < wanted):
            found, is_last = self._documents.read(_DOCUMENTS_PER_CALL)
            num_read += len(found)
            num_tokens += sum(len(document.tokens) for document in found)
            documents += found
        if self._rules.splits:
            # What is left continues in the next row, so it stays first.
            first = len(self._left)
            order = [first + number for number in self._order(len(documents) - first)]
            documents = [*documents[:first], *(documents[number] for number in order)]
        self._rows, self._left = self._rules.rows(documents, self._order)
        self._taken = 0

    def _order(self, count: int) -> Sequence[int]:
        order: list[int] = permutation(count, self._seed, self._block, self._shuffle).tolist()
        return order


class LaneDocuments:
    """The tokenized documents of lane *number* of *count*, again and again."""

    def __init__(
        self, stream: RowStream, name: str, number: int, count: int, rules: RowRules
    ) -> None:
        self._stream = stream
        self._name = name
        self._lane = (number, count)
        self._rules = rules
        self._rows = stream.rows.lane(number, count)
        self._beginning = self._rows.state_dict()
        self._iterator: Iterator[Any] | None = None
        self._has_some = False

    def read(self, count: int) -> tuple[list[Document], bool]:
        """Return the next documents, at most *count*, and whether they are the last before the stream begins again."""
        if self._iterator is None:
            self._iterator = iter(self._rows)
        rows = list(islice(self._iterator, count))
        documents = self._tokenized(rows) if rows else []
        self._has_some = self._has_some or bool(documents)
        is_last = len(rows) < count
        if is_last:
            self._begin_again()
        return documents, is_last

    def _tokenized(self, rows: list[Any]) -> list[Document]:
        stream = self._stream
        table = StreamedRows(stream.source.path, rows, stream.rows.fields)
        documents = []
        for number, sample in enumerate(stream.encode(table)):
            for truncated in stream.policy.apply([sample], partial(table.place, number)):
                self._check_length(len(truncated.tokens), partial(table.place, number))
                documents.append(Document.of(truncated.tokens, truncated.labelled))
        return documents

    def _check_length(self, length: int, where: Where) -> None:
        if length > self._rules.size and not self._rules.splits:
            raise RecipeError(
                "a document is longer than a row",
                where=where(),
                value=f"{length} tokens, packed_sequence.size {self._rules.size}",
                hint="set pretrain.split_documents true, dataset.seq_length to the size of a row with "
                "dataset.truncation right, or a larger packed_sequence.size",
            )

    def _begin_again(self) -> None:
        if not self._has_some:
            number, count = self._lane
            raise RecipeError(
                "a stream has too few documents to divide it among the rows of a global batch",
                where=f"dataset.sources.{self._name}" if self._name else "dataset",
                value=f"part {number + 1} of {count} of {self._stream.source.path} has no document with labels",
                hint="read it without streaming, or use more data or a smaller step_scheduler.global_batch_size",
            )
        self._rows.load_state_dict(copy.deepcopy(self._beginning))
        self._iterator = None

    def state_dict(self) -> State:
        state: State = copy.deepcopy(self._rows.state_dict())
        return state

    def load_state_dict(self, state: State) -> None:
        self._rows.load_state_dict(copy.deepcopy(state))
        self._iterator = None
        self._has_some = True


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
    documents = []
    start = 0
    for length in arrays["lengths"]:
        stop = start + length
        documents.append(Document(arrays["tokens"][start:stop], arrays["labelled"][start:stop]))
        start = stop
    return documents
