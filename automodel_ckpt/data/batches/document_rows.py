"""Put documents into rows of a fixed number of tokens: whole documents, or a stream of tokens that rows divide.

A row that a document continues from the row before repeats its last token there, so that each token is predicted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from automodel_ckpt.data.batches.packing import best_fit_decreasing, lengths_of
from automodel_ckpt.data.collate import IGNORE_INDEX

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
