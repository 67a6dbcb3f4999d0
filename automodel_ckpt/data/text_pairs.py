"""Builder for pairs of texts that belong together, such as questions and passages, and its collators.

A sample is the tokens of its texts one after another: the query, the positive document, and any number of negative
documents. Its labels are the tokens, with -100 for the first token of each text, so that data sets, mixtures and
streams treat it like every other sample.

If a model reads texts together, a sample has the tokens of the query with each document instead. The first token of
each document has no label either if the tokenizer distinguishes the two texts (``token_type_ids``).
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Unpack

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
    RowOptions,
    Sample,
    require_choice,
    require_keys,
    require_range,
    require_tokenizer,
    unusable_sample,
)
from automodel_ckpt.data.rows.rows import FieldTemplate, Rows
from automodel_ckpt.data.samples.encoder import encode_all, tokenize, truncated
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import (
    EarlierTruncation,
    Samples,
    TokenizedDataset,
    TokenizedSample,
    too_long,
)
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_NEGATIVES_HINT = (
    "add a field negative, negatives or negative_N to the rows, with a text, a list of texts or null; or name other "
    "fields in dataset.negative_fields"
)


def has_types(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the tokens of a pair have types, because there is no *template* and the tokenizer makes them."""
    if template:
        return False
    [(_, types)] = tokenize(tokenizer, [["a"], ["b"]])
    return any(types)


@dataclass(frozen=True)
class TextsEncoder:
    """Tokenizes the texts of rows with the special tokens that the tokenizer adds.

    With *template* None, these are the query and each document, as libraries that compute embeddings read them.
    Otherwise, each document is tokenized together with its query, as a text that the template writes, or for an empty
    template in the tokenizer's form of two texts.

    Texts of more than *seq_length* tokens (None: no limit) are truncated by the tokenizer, or rejected with
    *truncation* ``error``; *query_length* is the limit of queries (None: *seq_length*).
    """

    tokenizer: PreTrainedTokenizerBase
    seq_length: int | None
    truncation: str
    template: str | None = None
    query_length: int | None = None

    def __post_init__(self) -> None:
        require_tokenizer(self.tokenizer)
        require_choice("truncation", self.truncation, ("error", "right"))
        if self.template is not None and self.query_length is not None:
            raise RecipeError(
                "a query with a document is one text, with the limit dataset.seq_length",
                where="dataset.query_length",
                value=self.query_length,
                hint="",
            )

    def samples(self, texts: Sequence[Sequence[str]], rows: Rows) -> Samples:
        """Make a sample of the *texts* of each of *rows*: the query, the positive document, and negative documents.

        Raises :class:`RecipeError` for a text without tokens, and for one that is too long.
        """
        noun = "a text of a pair" if self.template is None else "a query with its document"
        makes_types = self.template is not None and has_types(self.tokenizer, self.template)
        encoded = self._encoded(texts, rows)
        samples = []
        for number, row in enumerate(texts):
            tokens: Ids = []
            labelled: list[bool] = []
            is_cut = False
            for position in range(len(row) - (self.template is not None)):
                part, ids, types = next(encoded)
                limit = self.query_length if position == 0 else None
                limit = limit or self.seq_length
                if not ids:
                    raise rows.unusable(number, f"{noun} has no tokens", "")
                if limit is not None and len(ids) > limit:
                    if self.truncation == "error":
                        raise too_long(
                            {number: len(ids)}, limit, rows.num_rows, rows.place, noun[2:]
                        )
                    ids, types = truncated(self.tokenizer, part, limit)
                    is_cut = True
                tokens += ids
                flags = [False] + [True] * (len(ids) - 1)
                if makes_types:
                    flags[types.index(1) if 1 in types else -1] = False
                labelled += flags
            samples.append(TokenizedSample(tokens, labelled, is_cut=is_cut))
        return samples

    def _encoded(
        self, texts: Sequence[Sequence[str]], rows: Rows
    ) -> Iterator[tuple[Sequence[str], Ids, Ids]]:
        """Yield each of the *texts* of *rows*, or pair of texts, with its tokens and their types, if it has any."""
        parts: list[Sequence[str]] = []
        written = FieldTemplate(self.template) if self.template else None
        for number, (query, *documents) in enumerate(texts):
            parts += [] if self.template is not None else [(query,)]
            for document in documents:
                part: Sequence[str] = (document,) if self.template is None else (query, document)
                if written is not None:
                    fields = {"query": query, "document": document}
                    part = (written.write(fields, partial(rows.place, number)),)
                parts.append(part)
        if self.template == "":
            tokens = tokenize(self.tokenizer, list(zip(*parts, strict=True)))
        else:
            single = [text for (text,) in parts]
            found = encode_all(self.tokenizer, single, add_special_tokens=True)
            tokens = [(ids, []) for ids in found]
        for part, (ids, types) in zip(parts, tokens, strict=True):
            yield part, ids, types


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
            hint=_NEGATIVES_HINT,
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
    require_keys(sample, "input_ids", "labels")
    labels = sample["labels"]
    starts = [position for position, label in enumerate(labels) if label == IGNORE_INDEX]
    if len(starts) < least or starts[0] != 0 or len(starts) % step:
        raise unusable_sample(what, f"texts begin at {starts[:10]}")
    return starts


_NEGATIVES = re.compile(r"negatives?(_\d+)?")


def text_pairs(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 512,
    query_field: str = "query",
    positive_field: str = "positive",
    negative_fields: list[str] | None = None,
    max_negatives: int | None = None,
    query_prompt: str = "",
    document_prompt: str = "",
    pair_template: str | None = None,
    truncation: Literal["error", "right"] = "right",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one sample per row: a query, its document, and any negative documents.

    *query_field* and *positive_field* are fields, or templates of several, such as ``"{{ title }}: {{ body }}"``.
    *negative_fields* contain a text, a list of texts, or null; by default, they are the fields that are named
    ``negative``, ``negatives`` or ``negative_N``. At most *max_negatives* of a row are used. The recipe supplies the
    prompts, which are written before each query and each document, from its section ``embedding``, or the text of a
    query with a document from ``reranker.template``.

    The tokenizer adds the special tokens that it adds to any text. With *truncation* ``right``, a text of more than
    *seq_length* tokens is truncated as the tokenizer does it, with its special tokens, and the number of rows with such
    texts is logged. ``error`` rejects such rows with their location.
    """
    if max_negatives is not None:
        require_range("max_negatives", max_negatives, 0)
    encoder = TextsEncoder(tokenizer, seq_length, truncation, pair_template)
    fields = (query_field, positive_field, negative_fields)

    def encode(rows: Rows) -> Samples:
        texts = texts_of(rows, *fields, (query_prompt, document_prompt), max_negatives)
        return encoder.samples(texts, rows)

    key = (*fields, max_negatives, query_prompt, document_prompt, truncation, seq_length)
    # Keys of earlier versions have no template.
    joint = () if pair_template is None else (pair_template,)
    return samples_of(
        path,
        tokenizer,
        encode,
        EarlierTruncation.of("right", seq_length),
        key=("text_pairs", *key, *joint),
        **options,
    )


def texts_of(
    rows: Rows,
    query_field: str,
    positive_field: str,
    negative_fields: list[str] | None,
    prompts: tuple[str, str],
    max_negatives: int | None = None,
) -> list[list[str]]:
    """The texts of each row: its query and its documents, each behind one of *prompts*. See :func:`text_pairs`.

    Raises :class:`RecipeError` with the row's location for a value that is not text, or empty.
    """
    queries, positives = rows.texts([query_field, positive_field])
    if negative_fields is None:
        negative_fields = [field for field in rows.fields if _NEGATIVES.fullmatch(field)]
    columns = rows.columns(negative_fields)
    found = []
    for number, (query, positive) in enumerate(zip(queries, positives, strict=True)):
        negatives: list[str] = []
        for field, column in zip(negative_fields, columns, strict=True):
            value = column[number]
            texts = [value] if isinstance(value, str) else [] if value is None else value
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise rows.unusable(
                    number,
                    f"field {field} of a sample is not text, a list of texts or null",
                    str(value)[:80],
                    _NEGATIVES_HINT,
                )
            negatives += texts
        documents = [positive, *negatives[:max_negatives]]
        if not all(text.strip() for text in (query, *documents)):
            raise rows.unusable(number, "a text of a pair is empty", "")
        before_query, before_document = prompts
        found.append([before_query + query, *(before_document + text for text in documents)])
    return found


class PairCollator:
    """Pads the texts of pairs to rows of one length: query and document of each pair in turn, then all negatives.

    The argument is a non-empty list of samples of :func:`text_pairs`. Returns int64 tensors ``input_ids``,
    ``attention_mask`` and ``labels`` of shape [texts, length], where the labels are the tokens and -100 for padding;
    ``num_negatives`` [pairs]; and ``digests`` [texts], which are equal for equal texts. Padding is on the right. Raises
    :class:`RecipeError` for other samples.
    """

    draws_nothing = True

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self._pad = PadCollator(pad_token_id, pad_to_multiple_of)

    def __call__(self, samples: Sequence[AnySample]) -> Batch:
        all_pairs, all_negatives, counts = [], [], []
        for sample in samples:
            ids = list(sample.get("input_ids", ()))
            starts = starts_of(sample, "a sample is no pair of texts", least=2)
            texts = [ids[start:end] for start, end in pairwise([*starts, len(ids)])]
            all_pairs += texts[:2]
            all_negatives += texts[2:]
            counts.append(len(texts) - 2)
        rows = [{"input_ids": ids, "labels": ids} for ids in all_pairs + all_negatives]
        batch = self._pad(rows)
        batch["num_negatives"] = torch.tensor(counts)
        batch["digests"] = torch.tensor([_digest(row["input_ids"]) for row in rows])
        return batch


def _digest(ids: Sequence[int]) -> int:
    content = np.asarray(ids, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)
