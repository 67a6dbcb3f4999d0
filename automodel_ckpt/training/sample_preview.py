"""The samples of a recipe as they are trained, for ``ckpt-train --show-samples``, without its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.collate import IGNORE_INDEX
from automodel_ckpt.data.media.image_packing import PackedImages
from automodel_ckpt.data.samples.teacher_targets import TargetedDataset
from automodel_ckpt.data.samples.tokenized import LengthSummary, TokenizedDataset, note_lines
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.training.recipe import Recipe
from automodel_ckpt.training.start.base_commit import commits_of_run, pin_base

MAX_MEASURED = 200
"""Number of samples that are measured if the data set does not know their lengths."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a sample, as *text*, that are all trained on or all not."""

    text: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class PreviewSample:
    """A sample in the order of training: its *number* in the data set, its tokens and labels, and its text.

    *label* is the label of a sample without labels of tokens. It is empty for other samples.
    """

    number: int
    num_tokens: int
    num_labels: int
    spans: tuple[Span, ...]
    label: str = ""


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What a recipe trains on. With *is_partial*, *lengths* has only the lengths of the first samples.

    *num_truncated* and *num_skipped* are None when they are unknown. *packs* and *template* are in words, and empty if
    there are none. *num_audio_tokens* is the part of *lengths* that represents audio. *notes* are warnings about
    samples.
    """

    lengths: LengthSummary
    is_partial: bool
    num_truncated: int | None = None
    num_skipped: int | None = None
    packs: str = ""
    template: str = ""
    num_audio_tokens: int = 0
    notes: Sequence[str] = ()


class _DataIsBuilt(Exception):
    """Ends a recipe's ``build`` after its data, before its model."""


def built_data(recipe_class: type[Recipe], recipe_arguments: Mapping[str, Any]) -> Recipe:
    """Build the preprocessor and the training data of a recipe, as one rank without a process group, and no model.

    *recipe_arguments* are the arguments of the class. Raises :class:`RecipeError` if they cannot be built.
    """

    class DataOnly(recipe_class):  # type: ignore[misc,valid-type]
        def build_trainable(self, *arguments: Any, **keywords: Any) -> Any:
            raise _DataIsBuilt

    recipe: Recipe = DataOnly(**recipe_arguments)
    recipe.is_dry_run = True
    recipe.layout = RankLayout(0, Sizes(), 0, torch.device("cpu"), None)  # type: ignore[arg-type]
    recipe.check_sections()
    recipe.config = pin_base(recipe.config, recorded=commits_of_run(recipe.config))
    with contextlib.suppress(_DataIsBuilt):
        recipe.build()
    return recipe


def first_samples(recipe: Recipe, num_samples: int) -> Iterator[PreviewSample]:
    """Yield the first samples of the first epoch, collated as for training, with their text."""
    tokenizer = getattr(recipe.preprocessor, "tokenizer", recipe.preprocessor)
    for number, row in _rows(recipe, num_samples):
        is_trained = [label != IGNORE_INDEX for label in row.labels]
        num_trained = sum(is_trained)
        spans = _spans(tokenizer, row.tokens, is_trained)
        yield PreviewSample(number, len(row.tokens), num_trained, spans, row.label)


def summary(recipe: Recipe) -> DataSummary:
    """Summarize the training data of a recipe that :func:`built_data` returned."""
    dataset = recipe.dataloader.dataset
    if isinstance(dataset, TargetedDataset):
        # It has the same samples and packs as the data set that it wraps.
        dataset = dataset.dataset
    packs = ""
    if isinstance(dataset, PackedDataset | PackedImages):
        waste = 100 * dataset.waste
        packs = f"{len(dataset):,} of {dataset.size:,} tokens, {waste:.1f}% of them empty"
    samples = dataset.dataset if isinstance(dataset, PackedDataset) else dataset
    if isinstance(samples, TokenizedDataset):
        truncated, skipped, *_ = samples.counts.tolist()
        template = samples.template or ""
        notes = note_lines(samples.notes, len(samples))
        return DataSummary(samples.summary, False, truncated, skipped, packs, template, 0, notes)
    lengths, num_labels, num_audio_tokens = [], 0, 0
    audio_token: Any = getattr(recipe.preprocessor, "audio_token_id", None)
    has_token_labels = True
    for _, row in _rows(recipe, MAX_MEASURED):
        lengths.append(len(row.tokens))
        num_audio_tokens += row.tokens.count(audio_token)
        num_labels += sum(label != IGNORE_INDEX for label in row.labels)
        has_token_labels = not row.label
    measured = LengthSummary.of(
        np.asarray(lengths, dtype=np.int64), num_labels if has_token_labels else None
    )
    is_partial = len(lengths) == MAX_MEASURED
    return DataSummary(measured, is_partial, packs=packs, num_audio_tokens=num_audio_tokens)


class _Row(NamedTuple):
    """A row of a micro-batch without padding.

    *label* is the label of the whole row. It is empty if the tokens of the row have labels.
    """

    tokens: list[int]
    labels: list[int]
    label: str


def _rows(recipe: Recipe, num_rows: int) -> Iterator[tuple[int, _Row]]:
    """Yield (number, row) of the first rows of the first epoch."""
    left = num_rows
    for batch in recipe.dataloader:
        start = 0
        for micro_batch in batch.micro_batches:
            owners = recipe.samples_of_rows(micro_batch)
            for owner, row in zip(owners, _rows_of(recipe, micro_batch), strict=True):
                # A group that is not full is completed by a row without labels, which is no sample.
                if start + owner >= len(batch.sample_ids):
                    continue
                if left == 0:
                    return
                left -= 1
                yield batch.sample_ids[start + owner], row
            start += max(owners, default=-1) + 1
        if batch.last_of_epoch:
            return


def _rows_of(recipe: Recipe, micro_batch: Mapping[str, torch.Tensor]) -> Iterator[_Row]:
    tokens, labels = micro_batch["input_ids"], micro_batch["labels"]
    mask = micro_batch.get("attention_mask")
    in_words = recipe.labels_in_words(micro_batch)
    for index in range(len(tokens)):
        keep = slice(None) if mask is None else mask[index].bool()
        kept = tokens[index][keep].tolist()
        if in_words:
            yield _Row(kept, [IGNORE_INDEX] * len(kept), in_words[index])
        else:
            yield _Row(kept, labels[index][keep].tolist(), "")


def _spans(tokenizer: Any, tokens: list[int], trained: list[bool]) -> tuple[Span, ...]:
    """Divide a sample into texts that are trained on and texts that are not."""
    spans = []
    start = 0
    before = ""
    for is_trained, group in groupby(trained):
        end = start + len(list(group))
        # The text up to here minus the text before it: a tokenizer decodes the beginning of a text differently.
        whole = _decoded(tokenizer, tokens[:end])
        text = whole.removeprefix(before)
        if not whole.startswith(before):
            text = _decoded(tokenizer, tokens[start:end])
        spans.append(Span(text, is_trained))
        start, before = end, whole
    return tuple(spans)


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens)) + " "
    return str(tokenizer.decode(tokens, skip_special_tokens=False))
