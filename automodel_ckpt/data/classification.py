"""Builders for texts with labels: from data files, directories or the Hugging Face Hub.

Texts are tokenized as transformers' pipelines do: with the special tokens that the tokenizer adds, and no end token
beside these. Samples are prepared once and cached under a digest of the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import (
    Batch,
    Integers,
    Item,
    Sample,
    padded,
)
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.messages import at_row, turns_of
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.arguments import at_most, require_choice, require_tokenizer
from automodel_ckpt.data.rows.rows import RowRange, Rows, names_in
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.encoder import truncation_on_the_right
from automodel_ckpt.data.samples.labels import Labels, LabelValues, Reading, reading_of
from automodel_ckpt.data.samples.samples import identity, prepared
from automodel_ckpt.data.samples.tokenized import LengthSummary, SampleArrays
from automodel_ckpt.data.samples.truncation import Truncation
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_FORMAT = 2
"""Part of the cache's keys. Increase it when the samples of the same data change."""
_ROWS_PER_CALL = 1000


class LabeledTexts(SampleArrays):
    """A map-style data set of texts with labels.

    A sample is ``{"input_ids": list[int], "targets": list[float]}``, for pairs of texts of some encoders with
    ``token_type_ids``. The samples are concatenated: sample i is ``tokens[ends[i - 1]:ends[i]]``. *types* is empty or
    as long as *tokens*; *targets* is [samples, numbers] (:meth:`~automodel_ckpt.data.samples.labels.Labels.targets`).
    *num_cut* [1] is the number of truncated samples.
    """

    draws_nothing = True
    array_names = ("tokens", "types", "ends", "targets", "num_cut")
    identity: str | None = None
    """A digest that changes with the samples; None if unknown."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        types: npt.NDArray[np.int32],
        ends: Integers,
        targets: npt.NDArray[np.float64],
        num_cut: Integers,
    ) -> None:
        self.tokens = tokens
        self.types = types
        self.ends = ends
        self.targets = targets
        self.num_cut = num_cut

    def first(self, max_samples: int | None) -> LabeledTexts:
        """Return a data set of the first *max_samples* samples (None: all), which shares the arrays."""
        num_samples = at_most(max_samples, len(self))
        ends = self.ends[:num_samples]
        targets = self.targets[:num_samples]
        return LabeledTexts(self.tokens, self.types, ends, targets, self.num_cut)

    @property
    def summary(self) -> LengthSummary:
        """The lengths of the samples."""
        return LengthSummary.of(self.lengths, None)

    def __getitem__(self, index: int) -> dict[str, list[Any]]:
        span = self.span(index)
        sample: dict[str, list[Any]] = {
            "input_ids": self.tokens[span].tolist(),
            "targets": self.targets[index].tolist(),
        }
        if len(self.types):
            sample["token_type_ids"] = self.types[span].tolist()
        return sample


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
        targets = sample.get("targets", ())
        if not sample.get("input_ids") or len(targets) != self.labels.num_targets:
            raise RecipeError(
                "a sample is not a text with a label",
                where="dataset",
                value={name: str(value)[:80] for name, value in sample.items()},
                hint='return {"input_ids": [...], "targets": [...]} (automodel_ckpt.data.classification.texts does), '
                "or set dataloader.collate_fn",
            )


@dataclass(frozen=True)
class TextEncoder:
    """Tokenizes texts, pairs of texts, or lists of messages in a chat template, with the tokenizer's special tokens."""

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    policy: Truncation
    text_field: str
    pair_field: str | None
    chat_template: str | None

    @property
    def names(self) -> list[str]:
        """The fields of the data that are used."""
        return names_in(self.text_field) + (names_in(self.pair_field) if self.pair_field else [])

    @cached_property
    def _template(self) -> ChatTemplate:
        text = template_of(self.tokenizer, self.chat_template)
        return ChatTemplate(self.tokenizer, text, {}, False)

    def encode(self, rows: Rows) -> list[Sample]:
        """Make ``input_ids`` of each row, and ``token_type_ids`` if the tokenizer makes them, truncated by the policy.

        The tokenizer truncates, so that its special tokens remain. With the policy ``error``, long samples are not
        truncated. Raises :class:`RecipeError` with the location of a row without text.
        """
        columns, adds_special_tokens = self._columns(rows)
        samples = self._tokenized(columns, adds_special_tokens)
        if self.policy.policy == "error":
            return samples
        limit = self.policy.seq_length
        for number, sample in enumerate(samples):
            if len(sample["input_ids"]) > limit:
                self.policy.num_cut += 1
                row = [[column[number]] for column in columns]
                with truncation_on_the_right(self.tokenizer):
                    [samples[number]] = self._tokenized(
                        row, adds_special_tokens, truncation=True, max_length=limit
                    )
        # The backend keeps the truncation of the last call, and the keys of caches contain it.
        self._tokenized([["a"]], adds_special_tokens)
        return samples

    def _columns(self, rows: Rows) -> tuple[list[list[str]], bool]:
        """The texts of all rows, and whether the tokenizer adds special tokens: a chat template has written them."""
        if not rows.contain_messages([self.text_field]):
            fields = [self.text_field]
            if self.pair_field is not None:
                fields.append(self.pair_field)
            return rows.texts(fields), True
        if self.pair_field is not None:
            raise RecipeError(
                "messages have no second text",
                where="dataset.pair_field",
                value=self.pair_field,
                hint="remove it: all messages of a conversation are one text",
            )
        rendered = []
        for number, conversation in enumerate(rows.values(self.text_field)):
            with at_row(rows, number):
                rendered.append(self._template.text(turns_of(conversation)))
        return [rendered], False

    def _tokenized(
        self, columns: Sequence[list[str]], adds_special_tokens: bool, **options: Any
    ) -> list[Sample]:
        encoded: Any = self.tokenizer(
            *columns,
            add_special_tokens=adds_special_tokens,
            return_attention_mask=False,
            verbose=False,
            **options,
        )
        names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
        samples = []
        for values in zip(*(encoded[name] for name in names), strict=True):
            sample = {}
            for name, tokens in zip(names, values, strict=True):
                sample[name] = list(tokens)
            samples.append(sample)
        return samples


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
) -> LabeledTexts:
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
    policy = _policy(truncation, seq_length)
    encoder = TextEncoder(
        require_tokenizer(tokenizer), policy, text_field, pair_field, chat_template
    )
    source = Source.of(path, name, split, revision)

    def build() -> LabeledTexts:
        source.require([*encoder.names, label_field])
        values = [_plain(value) for value in source.values(label_field)]
        read = reading_of(
            labels,
            values,
            label_values,
            field=label_field,
            classes=source.class_names(label_field),
        )
        return labeled_texts(source, encoder, values, read)

    key: tuple[object, ...] = (
        source.fingerprint(),
        text_field,
        pair_field,
        label_field,
        chat_template,
        truncation,
        policy.seq_length,
        str(labels),
    )
    if label_values != "auto":
        key += (label_values,)
    return cached_texts("classification-texts", key, encoder, build, source.path, max_samples)


def _policy(truncation: str, seq_length: int | None) -> Truncation:
    require_choice("truncation", truncation, ("error", "right"))
    return Truncation.of(truncation, seq_length)


def cached_texts(
    name: str,
    key: tuple[object, ...],
    encoder: TextEncoder,
    build: Callable[[], LabeledTexts],
    what: str,
    max_samples: int | None,
) -> LabeledTexts:
    """Return the first *max_samples* samples of *build* for *key*, from the cache if they are there.

    *what* is the name of the data in the log.
    """

    def save(directory: Path) -> None:
        build().save(directory)

    whole_key = (_FORMAT, *key)
    dataset = prepared(name, whole_key, encoder.tokenizer, save, LabeledTexts)
    if num_cut := int(dataset.num_cut[0]):
        log.warning(
            "%s: %d of %d samples were truncated to seq_length %d",
            *(what, num_cut, len(dataset), encoder.policy.seq_length),
        )
    dataset = dataset.first(max_samples)
    dataset.identity = identity(whole_key, encoder.tokenizer)
    log.info("%s: %s", what, dataset.summary)
    return dataset


def _plain(value: Any) -> Any:
    """Python's values in place of those of NumPy."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def labeled_texts(
    rows: Rows, encoder: TextEncoder, values: Sequence[Any], read: Reading
) -> LabeledTexts:
    """Tokenize all *rows* and convert their labels. Raises :class:`RecipeError` with the location of a bad row."""
    targets = []
    for number, value in enumerate(values):
        with at_row(rows, number):
            targets.append(read(value))
    samples: list[Sample] = []
    for start in range(0, rows.num_rows, _ROWS_PER_CALL):
        stop = min(start + _ROWS_PER_CALL, rows.num_rows)
        samples += encoder.encode(RowRange(rows, start, stop))
    sizes = [len(sample["input_ids"]) for sample in samples]
    lengths = np.array(sizes, dtype=np.int64)
    empty = np.flatnonzero(lengths == 0).tolist()
    if empty:
        raise RecipeError(
            "a text has no tokens",
            where=rows.place(empty[0]),
            value=f"{len(empty)} of {len(samples)} samples",
            hint="remove samples with empty texts",
        )
    encoder.policy.require_short(np.arange(len(samples)), lengths, rows.place)
    tokens = chain.from_iterable(sample["input_ids"] for sample in samples)
    flat_types = chain.from_iterable(sample.get("token_type_ids", ()) for sample in samples)
    types = np.fromiter(flat_types, np.int32)
    return LabeledTexts(
        np.fromiter(tokens, np.int32),
        # Models use zeros for a missing argument.
        types if types.any() else np.empty(0, np.int32),
        np.cumsum(sizes, dtype=np.int64),
        np.array(targets, dtype=np.float64).reshape(len(samples), -1),
        np.array([encoder.policy.num_cut], dtype=np.int64),
    )
