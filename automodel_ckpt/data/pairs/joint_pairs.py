"""Queries and documents that a model reads together, as one text: their tokens, and the collator of their rows.

A sample has a query with several documents: the tokens of the query with the first document, which is the right one,
then those of the query with each other document. Its labels are the tokens, with -100 for the first token of each of
them, and for the first token of each document if the tokenizer distinguishes the two texts (``token_type_ids``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.collate import IGNORE_INDEX, PadCollator
from automodel_ckpt.data.rows.arguments import require_choice
from automodel_ckpt.data.rows.fields import FieldTemplate
from automodel_ckpt.data.samples.fast_encoding import encode_all, truncation_on_the_right
from automodel_ckpt.data.samples.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


def has_types(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the tokens of a pair have types, because there is no *template* and the tokenizer makes them."""
    if template:
        return False
    encoded: Any = tokenizer("a", "b", verbose=False)
    return any(encoded.get("token_type_ids", ()))


class JointEncoder:
    """Tokenizes each document together with its query, with the special tokens that the tokenizer adds.

    *template* is the text of both, with the names ``query`` and ``document``; empty: the tokenizer's form of two texts.
    A text of more than *seq_length* tokens (None: no limit) is truncated by the tokenizer, or rejected with
    *truncation* ``error``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seq_length: int | None,
        truncation: str,
        template: str,
    ) -> None:
        require_choice("truncation", truncation, ("error", "right"))
        self._tokenizer = tokenizer
        self._limit = seq_length
        self._rejects = truncation == "error"
        self._template = FieldTemplate(template) if template else None
        self._has_types = has_types(tokenizer, template)

    def samples(
        self, rows: Sequence[Sequence[str]], where: Callable[[int], str]
    ) -> list[TokenizedSample]:
        """Make a sample of each row of texts: the query, and its documents. ``where(n)`` is the location of row n."""
        pairs, numbers = [], []
        for number, (query, *documents) in enumerate(rows):
            pairs += [(query, document) for document in documents]
            numbers += [number] * len(documents)
        samples: list[TokenizedSample] = []
        parts = self._tokenized(pairs, numbers, where)
        for number, (ids, types) in zip(numbers, parts, strict=True):
            is_cut = self._limit is not None and len(ids) > self._limit
            if is_cut:
                ids, types = self._shortened(pairs[len(samples)], len(ids), where(number))
            labelled = [False] + [True] * (len(ids) - 1)
            if self._has_types:
                labelled[types.index(1) if 1 in types else -1] = False
            samples.append(TokenizedSample(ids, labelled, is_cut=is_cut))
        return _joined(samples, numbers, len(rows))

    def _tokenized(
        self, pairs: Sequence[tuple[str, str]], numbers: Sequence[int], where: Callable[[int], str]
    ) -> list[tuple[list[int], list[int]]]:
        """The ids and the types of each pair."""
        if self._template is None:
            encoded = self._of_two(*map(list, zip(*pairs, strict=True)))
            ids = encoded["input_ids"]
            types = encoded.get("token_type_ids", [[]] * len(ids))
            return list(zip(map(list, ids), map(list, types), strict=True))
        texts = []
        for (query, document), number in zip(pairs, numbers, strict=True):
            row = {"query": query, "document": document}
            texts.append(self._template.write(row, lambda number=number: where(number)))  # type: ignore[misc]
        found = encode_all(self._tokenizer, texts, add_special_tokens=True)
        return [(each, []) for each in found]

    def _of_two(self, queries: Any, documents: Any, **options: Any) -> Any:
        return self._tokenizer(
            queries, documents, return_attention_mask=False, verbose=False, **options
        )

    def _shortened(
        self, pair: tuple[str, str], num_tokens: int, where: str
    ) -> tuple[list[int], list[int]]:
        if self._rejects:
            raise RecipeError(
                "a query with its document is longer than seq_length",
                where=where,
                value=f"{num_tokens} tokens, seq_length {self._limit}",
                hint="increase dataset.seq_length, set dataset.truncation: right, or remove this row",
            )
        options = {"truncation": True, "max_length": self._limit}
        with truncation_on_the_right(self._tokenizer):
            if self._template is None:
                encoded = self._of_two(*pair, **options)
            else:
                text = self._template.write({"query": pair[0], "document": pair[1]}, lambda: where)
                encoded = self._tokenizer(text, return_attention_mask=False, **options)
        return list(encoded["input_ids"]), list(encoded.get("token_type_ids", ()))


def _joined(
    parts: Sequence[TokenizedSample], numbers: Sequence[int], num_rows: int
) -> list[TokenizedSample]:
    """Concatenate the *parts* of each row; *numbers* are their rows."""
    samples = [TokenizedSample([], [], is_cut=False) for _ in range(num_rows)]
    for number, part in zip(numbers, parts, strict=True):
        whole = samples[number]
        samples[number] = TokenizedSample(
            [*whole.tokens, *part.tokens],
            [*whole.labelled, *part.labelled],
            is_cut=whole.is_cut or part.is_cut,
        )
    return samples


def check_negatives(dataset: Any, *, has_types: bool, where: str) -> None:
    """Warn of the queries in *dataset* that have one document, whose loss is 0, and of those of which another document
    has the tokens of the right one, so that no score can be right. Their numbers are in the log.

    Raises :class:`RecipeError` if all have one. *where* names the data set. One of another class is not checked.
    """
    if not isinstance(dataset, TokenizedDataset) or not len(dataset):
        return
    unlabelled_before = np.concatenate([[0], np.cumsum(~dataset.labelled[: dataset.ends[-1]])])
    num_texts = np.diff(unlabelled_before[dataset.ends], prepend=0)
    num_alone = int((num_texts == (2 if has_types else 1)).sum())
    if num_alone == len(dataset):
        raise RecipeError(
            "no query has a negative document: the loss of each is 0, and nothing is trained",
            where=where,
            value=counted(num_alone, "query", "queries"),
            hint="add a field negative, negatives or negative_N to the rows, or name another one in negative_fields",
        )
    if num_alone:
        log.warning(
            "%d of %d queries have no negative document: their loss is 0", num_alone, len(dataset)
        )
    num_equal = _num_with_equal_documents(dataset, num_texts, has_types=has_types)
    if num_equal:
        log.warning(
            "%d of %d queries have a negative document with the same tokens as their right one: "
            "both get the same score, which counts as wrong; remove these negatives",
            num_equal,
            len(dataset),
        )


def _num_with_equal_documents(
    dataset: TokenizedDataset, num_texts: npt.NDArray[np.int64], *, has_types: bool
) -> int:
    """Count the queries in *dataset* of which a later text has the tokens of the first one.

    *num_texts* [queries] are the numbers of tokens without a label: one for each text, or two with *has_types*.
    """
    step = 2 if has_types else 1
    num_tokens = dataset.ends[-1]
    starts = np.flatnonzero(~dataset.labelled[:num_tokens])[::step]
    ends = np.append(starts[1:], num_tokens)
    num_rows = num_texts // step
    if int(num_rows.sum()) != len(starts):
        return 0  # not the samples of JointEncoder, which the collator rejects
    firsts = np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    # Only texts of the same length and the same sum of tokens are compared one by one.
    sums = np.add.reduceat(dataset.tokens[:num_tokens], starts, dtype=np.int64)
    lengths = ends - starts
    candidates = (lengths == lengths[firsts]) & (sums == sums[firsts])
    candidates[firsts] = False
    equal = set()
    for row in np.flatnonzero(candidates).tolist():
        first = int(firsts[row])
        text = dataset.tokens[starts[row] : ends[row]]
        right = dataset.tokens[starts[first] : ends[first]]
        if np.array_equal(text, right):
            equal.add(first)
    return len(equal)


class ScoreCollator:
    """Pads each query with a document to a row, in the order of the samples.

    The argument is a non-empty list of samples of :class:`JointEncoder`. Returns int64 tensors ``input_ids``,
    ``attention_mask`` and ``labels`` [rows, length], where the labels are the tokens and -100 for padding; with
    *has_types* also ``token_type_ids``; and ``num_documents`` [queries]. Padding is on the right. Raises
    :class:`RecipeError` for other samples.
    """

    draws_nothing = True

    def __init__(
        self, pad_token_id: int, pad_to_multiple_of: int | None = None, *, has_types: bool = False
    ) -> None:
        self._pad = PadCollator(pad_token_id, pad_to_multiple_of)
        self._has_types = has_types

    def __call__(self, samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        rows: list[dict[str, list[int]]] = []
        second: list[int] = []
        counts = []
        for sample in samples:
            starts = self._starts_of(sample)
            ids = list(sample["input_ids"])
            firsts = starts[:: 2 if self._has_types else 1]
            for start, end in zip(firsts, [*firsts[1:], len(ids)], strict=True):
                rows.append({"input_ids": ids[start:end], "labels": ids[start:end]})
            if self._has_types:
                pairs = zip(firsts, starts[1::2], strict=True)
                second += [of_document - start for start, of_document in pairs]
            counts.append(len(firsts))
        batch = self._pad(rows)
        if self._has_types:
            positions = torch.arange(batch["input_ids"].shape[1])
            types = positions >= torch.tensor(second).unsqueeze(1)
            batch["token_type_ids"] = types.long() * batch["attention_mask"]
        batch["num_documents"] = torch.tensor(counts)
        return batch

    def _starts_of(self, sample: Mapping[str, Sequence[int]]) -> list[int]:
        """The positions of the first tokens of texts. Raises :class:`RecipeError` for another kind of sample."""
        is_sample = isinstance(sample, Mapping) and {"input_ids", "labels"} <= sample.keys()
        labels = sample["labels"] if is_sample else ()
        starts = [position for position, label in enumerate(labels) if label == IGNORE_INDEX]
        if not starts or starts[0] != 0 or (self._has_types and len(starts) % 2):
            raise RecipeError(
                "a sample is no query with its documents",
                where="dataset",
                value=sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__,
                hint="read it with automodel_ckpt.data.text_pairs.text_pairs, or set dataloader.collate_fn",
            )
        return starts
