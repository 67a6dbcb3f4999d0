"""The tokens of queries and documents, as separate texts or as texts that a model reads together.

If a model reads them together, a sample has the tokens of a query with its first document, which is the right one, then
the tokens of the query with each other document. Its labels are the tokens, with -100 for the first token of each of
them, and for the first token of each document if the tokenizer distinguishes the two texts (``token_type_ids``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    AnySample,
    Batch,
    Ids,
    PadCollator,
    Sample,
    Where,
    has_keys,
    require_sample,
)
from automodel_ckpt.data.rows.arguments import require_choice
from automodel_ckpt.data.rows.rows import FieldTemplate
from automodel_ckpt.data.samples.encoder import encode_all, tokenize, truncated
from automodel_ckpt.data.samples.tokenized import Samples, TokenizedDataset, TokenizedSample
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


def has_types(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the tokens of a pair have types, because there is no *template* and the tokenizer makes them."""
    if template:
        return False
    [(_, types)] = tokenize(tokenizer, [["a"], ["b"]])
    return any(types)


class TextsEncoder:
    """Tokenizes the texts of rows with the special tokens that the tokenizer adds.

    With *template* None, these are the query and each document, as libraries that compute embeddings read them.
    Otherwise, each document is tokenized together with its query, as a text that the template writes, or for an empty
    template in the tokenizer's form of two texts.

    Texts of more than *seq_length* tokens (None: no limit) are truncated by the tokenizer, or rejected with
    *truncation* ``error``; *query_length* is the limit of queries (None: *seq_length*).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seq_length: int | None,
        truncation: str,
        template: str | None = None,
        query_length: int | None = None,
    ) -> None:
        require_choice("truncation", truncation, ("error", "right"))
        self._tokenizer = tokenizer
        self._limits = (query_length or seq_length, seq_length)
        self._rejects = truncation == "error"
        self._template = FieldTemplate(template) if template else None
        self._is_joint = template is not None
        self._noun = "a query with its document" if self._is_joint else "a text of a pair"
        self._has_types = self._is_joint and has_types(tokenizer, template or "")

    def samples(self, rows: Sequence[Sequence[str]], where: Callable[[int], str]) -> Samples:
        """Make a sample of each row of texts: the query, the positive document, and negative documents.

        ``where(n)`` is the location of row n. Raises :class:`RecipeError` for a text without tokens, and for one that
        is too long.
        """
        parts = [self._parts(row, partial(where, number)) for number, row in enumerate(rows)]
        all_parts = list(chain.from_iterable(parts))
        if self._is_joint and self._template is None:
            encoded = iter(tokenize(self._tokenizer, list(zip(*all_parts, strict=True))))
        else:
            texts = [text for (text,) in all_parts]
            tokens_of = encode_all(self._tokenizer, texts, add_special_tokens=True)
            encoded = iter([(ids, []) for ids in tokens_of])
        samples = []
        for number, row_parts in enumerate(parts):
            tokens: Ids = []
            labelled: list[bool] = []
            is_cut = False
            for position, part in enumerate(row_parts):
                ids, types = next(encoded)
                limit = self._limits[position > 0]
                if not ids:
                    raise no_text(f"{self._noun} has no tokens", where(number))
                if limit is not None and len(ids) > limit:
                    if self._rejects:
                        raise RecipeError(
                            f"{self._noun} is longer than seq_length",
                            where=where(number),
                            value=f"{len(ids)} tokens, seq_length {limit}",
                            hint="increase dataset.seq_length, set dataset.truncation: right, or remove this row",
                        )
                    ids, types = truncated(self._tokenizer, part, limit)
                    is_cut = True
                tokens += ids
                flags = [False] + [True] * (len(ids) - 1)
                if self._has_types:
                    flags[types.index(1) if 1 in types else -1] = False
                labelled += flags
            samples.append(TokenizedSample(tokens, labelled, is_cut=is_cut))
        return samples

    def _parts(self, row: Sequence[str], where: Where) -> list[tuple[str, ...]]:
        """What is tokenized of a row: texts, or pairs of them."""
        query, *documents = row
        if not self._is_joint:
            return [(text,) for text in row]
        if self._template is None:
            return [(query, document) for document in documents]
        fields = [{"query": query, "document": document} for document in documents]
        return [(self._template.write(each, where),) for each in fields]


def no_text(what: str, where: str) -> RecipeError:
    """Make the error for an empty text of a pair."""
    return RecipeError(
        what, where=where, value="an empty text", hint="remove this row, or complete its texts"
    )


def check_negatives(dataset: Any, *, has_types: bool, where: str) -> None:
    """Warn of the queries in *dataset* that have one document: their loss is 0. Their number is in the log.

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


class ScoreCollator:
    """Pads each query with a document to a row, in the order of the samples.

    The argument is a non-empty list of samples of :class:`TextsEncoder` with a template. Returns int64 tensors
    ``input_ids``, ``attention_mask`` and ``labels`` [rows, length], where the labels are the tokens and -100 for
    padding; with *has_types* also ``token_type_ids``; and ``num_documents`` [queries]. Padding is on the right. Raises
    :class:`RecipeError` for other samples.
    """

    draws_nothing = True

    def __init__(
        self, pad_token_id: int, pad_to_multiple_of: int | None = None, *, has_types: bool = False
    ) -> None:
        self._pad = PadCollator(pad_token_id, pad_to_multiple_of)
        self._has_types = has_types

    def __call__(self, samples: Sequence[AnySample]) -> Batch:
        rows: list[Sample] = []
        second: Ids = []
        counts = []
        step = 2 if self._has_types else 1
        for sample in samples:
            starts = starts_of(sample, "a sample is no query with its documents", step=step)
            ids = list(sample["input_ids"])
            firsts = starts[::step]
            for start, end in pairwise([*firsts, len(ids)]):
                rows.append({"input_ids": ids[start:end], "labels": ids[start:end]})
            if self._has_types:
                second += [inner - start for start, inner in zip(firsts, starts[1::2], strict=True)]
            counts.append(len(firsts))
        batch = self._pad(rows)
        if self._has_types:
            positions = torch.arange(batch["input_ids"].shape[1])
            types = positions >= torch.tensor(second).unsqueeze(1)
            batch["token_type_ids"] = types.long() * batch["attention_mask"]
        batch["num_documents"] = torch.tensor(counts)
        return batch


def starts_of(sample: AnySample, what: str, *, least: int = 1, step: int = 1) -> Ids:
    """The positions of the first tokens of texts. Raises :class:`RecipeError`, *what*, for another kind of sample.

    There are at least *least*, and a multiple of *step*.
    """
    labels = sample["labels"] if has_keys(sample, "input_ids", "labels") else ()
    starts = [position for position, label in enumerate(labels) if label == IGNORE_INDEX]
    require_sample(
        len(starts) >= least and starts[0] == 0 and len(starts) % step == 0,
        sample,
        what,
        "read it with automodel_ckpt.data.text_pairs.text_pairs, or set dataloader.collate_fn",
    )
    return starts
