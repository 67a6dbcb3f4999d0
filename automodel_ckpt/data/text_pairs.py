"""Builder for pairs of texts that belong together, such as questions and passages, and its collator.

A sample is the tokens of its texts one after another: the query, the positive document, and any number of negative
documents. Its labels are the tokens, with -100 for the first token of each text, so that data sets, mixtures and
streams treat it like every other sample.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Unpack

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import AnySample, Batch, PadCollator
from automodel_ckpt.data.pairs.joint_pairs import TextsEncoder, no_text, starts_of
from automodel_ckpt.data.rows.arguments import RowOptions, require_range, require_tokenizer
from automodel_ckpt.data.rows.rows import Rows, names_in
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples
from automodel_ckpt.data.samples.truncation import EarlierTruncation
from automodel_ckpt.errors import RecipeError

_NEGATIVES = re.compile(r"negatives?(_\d+)?")
_NEGATIVES_IN_WORDS = "negative, negatives or negative_N"


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
    encoder = encoder_of(tokenizer, seq_length, truncation, pair_template)
    pairs = PairReader(
        encoder,
        query_field,
        positive_field,
        negative_fields,
        max_negatives,
        query_prompt,
        document_prompt,
    )
    key = (query_field, positive_field, negative_fields, max_negatives)
    # Keys of earlier versions have no template.
    joint = () if pair_template is None else (pair_template,)
    return samples_of(
        path,
        tokenizer,
        pairs.encode,
        EarlierTruncation.of("right", seq_length),
        fields=pairs.names,
        key=("text_pairs", *key, query_prompt, document_prompt, truncation, seq_length, *joint),
        **options,
    )


def encoder_of(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int | None,
    truncation: str,
    pair_template: str | None,
    query_length: int | None = None,
) -> TextsEncoder:
    """The encoder of separate texts (*pair_template* None), or of queries with documents as one text."""
    require_tokenizer(tokenizer)
    if pair_template is not None and query_length is not None:
        raise RecipeError(
            "a query with a document is one text, which has one limit",
            where="dataset.query_length",
            value=query_length,
            hint="remove it, and set dataset.seq_length",
        )
    return TextsEncoder(tokenizer, seq_length, truncation, pair_template, query_length)


@dataclass(frozen=True, slots=True)
class PairReader:
    """Reads the texts of rows. The fields are the arguments of :func:`text_pairs`."""

    encoder: TextsEncoder
    query_field: str
    positive_field: str
    negative_fields: list[str] | None
    max_negatives: int | None
    query_prompt: str
    document_prompt: str

    @property
    def names(self) -> list[str]:
        """The fields that are used, if the data has them."""
        names = [*names_in(self.query_field), *names_in(self.positive_field)]
        if self.negative_fields is not None:
            return [*names, *self.negative_fields]
        names += ["negative", "negatives"]
        names += [f"negative_{number}" for number in range(100)]
        return names

    def encode(self, rows: Rows) -> Samples:
        """Make a sample of each row. Raises :class:`RecipeError` with the row's location for a text that is empty."""
        queries, positives = rows.texts([self.query_field, self.positive_field])
        negatives = self._negatives(rows)
        texts = []
        for number, (query, positive) in enumerate(zip(queries, positives, strict=True)):
            documents = [positive, *negatives[number]]
            if not query.strip() or not all(document.strip() for document in documents):
                raise no_text("a text of a pair is empty", rows.place(number))
            written = [self.document_prompt + document for document in documents]
            texts.append([self.query_prompt + query, *written])
        return self.encoder.samples(texts, rows.place)

    def _negatives(self, rows: Rows) -> list[list[str]]:
        """The negative documents of each row."""
        fields = self.negative_fields
        if fields is None:
            fields = [field for field in rows.fields if _NEGATIVES.fullmatch(field)]
        elif fields:
            rows.require(fields)
        found: list[list[str]] = [[] for _ in range(rows.num_rows)]
        for field, values in zip(fields, rows.read(fields), strict=True):
            for number, value in enumerate(values):
                texts = [value] if isinstance(value, str) else [] if value is None else value
                if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                    raise RecipeError(
                        f"field {field} of a sample is not text, a list of texts or null",
                        where=rows.place(number),
                        value=str(value)[:80],
                        hint="correct this row, or list the fields with negatives in dataset.negative_fields "
                        f"(by default: {_NEGATIVES_IN_WORDS})",
                    )
                found[number] += texts
        return [texts[: self.max_negatives] for texts in found]


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
