"""Builders for texts with labels: from data files, directories or the Hugging Face Hub.

Texts are tokenized as transformers' pipelines do: with the special tokens that the tokenizer adds, and no end token
in addition. Samples are prepared once and cached under a digest of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import (
    Batch,
    Item,
    Key,
    padded,
    require_choice,
    require_keys,
    require_tokenizer,
    unusable_sample,
)
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.messages import at_row, turns_of
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.rows import Rows, names_in
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.encoder import tokenize, truncated
from automodel_ckpt.data.samples.labels import Labels, LabelValues, Reading, reading_of
from automodel_ckpt.data.samples.samples import identity, samples_of_rows
from automodel_ckpt.data.samples.tokenized import (
    EarlierTruncation,
    LengthSummary,
    Samples,
    TokenizedDataset,
    TokenizedSample,
)
from automodel_ckpt.errors import RecipeError


class LabeledTexts(TokenizedDataset):
    """A map-style data set of texts with labels.

    A sample is ``{"input_ids": list[int], "targets": list[float]}``, for pairs of texts of some encoders with
    ``token_type_ids``. The targets are from :meth:`~automodel_ckpt.data.samples.labels.Labels.targets`. The labels
    of tokens show their types.
    """

    # A promise is not inherited: a subclass could draw random numbers.
    draws_nothing = True

    @property
    def summary(self) -> LengthSummary:
        """The lengths of the samples."""
        return LengthSummary.of(self.lengths, None)

    def __getitem__(self, index: int) -> dict[str, list[Any]]:
        span = self.span(index)
        targets = self.numbers[index].tolist()
        sample = {"input_ids": self.tokens[span].tolist(), "targets": targets}
        if self._has_types:
            sample["token_type_ids"] = (~self.labelled[span]).astype(int).tolist()
        return sample

    @cached_property
    def _has_types(self) -> bool:
        # Models use zeros for a missing argument.
        return not self.labelled.all()


class LabelCollator:
    """Pads texts with labels on the right to the length of the longest.

    The argument is a non-empty list of samples of :class:`LabeledTexts`. Returns int64 tensors ``input_ids`` and
    ``attention_mask`` [samples, length], where length is rounded up to a multiple of *pad_to_multiple_of*, with
    ``token_type_ids`` if the samples have them; ``labels`` [samples], the index of the label for ``single_label``
    and otherwise 0; and ``targets`` [samples, numbers] in float32. A sample with the label -100 does not count.
    """

    # No generator is seeded per sample.
    draws_nothing = True

    def __init__(self, pad_token_id: int, labels: Labels, pad_to_multiple_of: int = 1) -> None:
        self.pad_token_id = pad_token_id
        self.labels = labels
        self.multiple = pad_to_multiple_of

    def __call__(self, samples: Sequence[Item]) -> Batch:
        for sample in samples:
            self._check(sample)
        padding = {"input_ids": self.pad_token_id, "attention_mask": 0}
        if "token_type_ids" in samples[0]:
            padding["token_type_ids"] = 0
        batch = padded(samples, padding, self.multiple)
        targets = torch.tensor([sample["targets"] for sample in samples], dtype=torch.float32)
        labels = torch.zeros(len(samples), dtype=torch.int64)
        if self.labels.problem == "single_label":
            labels = targets[:, 0].to(torch.int64)
        return {**batch, "labels": labels, "targets": targets}

    def _check(self, sample: Item) -> None:
        """Raise :class:`RecipeError` for a sample without text, or with another number of targets."""
        require_keys(sample, "input_ids", "targets")
        if not sample["input_ids"] or len(sample["targets"]) != self.labels.num_targets:
            what = f"a sample has no tokens, or not {self.labels.num_targets} targets"
            raise unusable_sample(what, sample["targets"])


@dataclass(frozen=True)
class TextEncoder:
    """Tokenizes texts, pairs of texts, or lists of messages in a chat template, with the tokenizer's special tokens."""

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    text_field: str
    pair_field: str | None
    chat_template: str | None
    truncation: str
    seq_length: int | None

    @property
    def names(self) -> list[str]:
        """The fields of the data that are used."""
        return names_in(self.text_field) + (names_in(self.pair_field) if self.pair_field else [])

    @cached_property
    def _template(self) -> ChatTemplate:
        text = template_of(self.tokenizer, self.chat_template)
        return ChatTemplate(self.tokenizer, text, {}, False)

    def encode(self, rows: Rows) -> Samples:
        """Make a sample of each row, with labels on the tokens of type 0.

        The tokenizer truncates, so that its special tokens remain. With *truncation* ``error``, long samples are not
        truncated. Raises :class:`RecipeError` with the location of a row without text.
        """
        columns, adds_special_tokens = self._columns(rows)
        options = {"add_special_tokens": adds_special_tokens}
        samples = []
        for number, (ids, types) in enumerate(tokenize(self.tokenizer, columns, **options)):
            limit = self.seq_length if self.truncation == "right" else None
            is_long = limit is not None and len(ids) > limit
            if limit is not None and is_long:
                texts = [column[number] for column in columns]
                ids, types = truncated(self.tokenizer, texts, limit, **options)
            if not ids or max(types, default=0) > 1:
                what = "a text has tokens of more than two types" if ids else "a text has no tokens"
                raise rows.unusable(number, what, type(self.tokenizer).__name__)
            labelled = [each == 0 for each in types] or [True] * len(ids)
            samples.append(TokenizedSample(ids, labelled, is_cut=is_long))
        return samples

    def _columns(self, rows: Rows) -> tuple[list[list[str]], bool]:
        """The texts of all rows, and whether the tokenizer adds special tokens: a chat template has written them."""
        if not rows.contain_messages([self.text_field]):
            pair = [] if self.pair_field is None else [self.pair_field]
            return rows.texts([self.text_field, *pair]), True
        if self.pair_field is not None:
            raise RecipeError(
                "messages have no second text",
                where="dataset.pair_field",
                value=self.pair_field,
                hint="",
            )
        rendered = []
        for number, conversation in enumerate(rows.values(self.text_field)):
            with at_row(rows, number):
                rendered.append(self._template.text(turns_of(conversation)))
        return [rendered], False


def texts(
    tokenizer: PreTrainedTokenizerBase,
    labels: Labels,
    path: str | list[str],
    seq_length: int | None = 512,
    text_field: str = "text",
    pair_field: str | None = None,
    label_field: str = "label",
    label_values: LabelValues = "auto",
    chat_template: str | None = None,
    truncation: Literal["error", "right"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
) -> TokenizedDataset:
    """Make a sample per row: a text and its label, for the recipe sequence_classification.

    *text_field* is a field with text, a template of several fields such as ``"{{ title }}: {{ body }}"``, or a field
    with a list of messages, which *chat_template* (default: the tokenizer's) renders. *pair_field* is the second text
    of a pair. Texts get the special tokens that the tokenizer adds.

    *label_field* contains a name of ``classification.labels`` or its index from 0; with the problem ``multi_label`` a
    list of them, or a list with a 0 or 1 for each label; with ``regression`` a number. Names that the data gives to its
    numbers (ClassLabel) are looked up in ``classification.labels``. Numbers that can be read in two ways are an error:
    then set *label_values* ``indices`` or ``one_hot``. A label that is none of these is rejected with its location.

    A sample of more than *seq_length* tokens is rejected with its location, or truncated with *truncation* ``right``,
    as the tokenizer truncates it for a pipeline.
    """
    require_choice("label_values", label_values, ("auto", "indices", "one_hot"))
    require_choice("truncation", truncation, ("error", "right"))
    encoder = TextEncoder(
        require_tokenizer(tokenizer), text_field, pair_field, chat_template, truncation, seq_length
    )
    source = Source.of(path, name, split, revision)

    def reading() -> Reading:
        source.require([*encoder.names, label_field])
        values, classes = source.values(label_field), source.class_names(label_field)
        return reading_of(labels, values, label_values, field=label_field, classes=classes)

    key: Key = (text_field, pair_field, label_field, chat_template)
    key += (truncation, EarlierTruncation.of(truncation, seq_length).seq_length, str(labels))
    if label_values != "auto":
        key += (label_values,)
    fingerprint = source.fingerprint()
    dataset = labeled_texts(
        "classification-texts",
        source,
        fingerprint,
        encoder,
        label_field,
        reading,
        key=key,
        max_samples=max_samples,
    )
    # Checkpoints contain it: another form would report that the data has changed.
    dataset.identity = identity((2, fingerprint, *key), tokenizer)
    return dataset


def labeled_texts(
    name: str,
    rows: Rows,
    fingerprint: str,
    encoder: TextEncoder,
    label_field: str,
    reading: Callable[[], Reading],
    *,
    key: Key,
    max_samples: int | None,
) -> TokenizedDataset:
    """Tokenize *rows*, and convert their labels by what *reading* returns, which is called once.

    They are cached under *name*, *fingerprint* and *key*. Raises :class:`RecipeError` with the location of a bad row.
    """
    known = cache(reading)

    def encode(part: Rows) -> Samples:
        read = known()
        samples = encoder.encode(part)
        for number, value in enumerate(part.values(label_field)):
            with at_row(part, number):
                samples[number] = samples[number]._replace(number=read(value))
        return samples

    return samples_of_rows(
        rows,
        fingerprint,
        encoder.tokenizer,
        encode,
        EarlierTruncation.of(encoder.truncation, encoder.seq_length),
        key=(name, *key),
        max_samples=max_samples,
        kind=LabeledTexts,
    )
