"""The samples of a recipe as they are trained, for ``ckpt-train --show-samples``, without its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.collate import IGNORE_INDEX
from automodel_ckpt.data.media.image_packing import PackedImages
from automodel_ckpt.data.samples.teacher_targets import TargetedDataset
from automodel_ckpt.data.samples.tokenized import (
    SKIPPED,
    TRUNCATED,
    LengthSummary,
    TokenizedDataset,
    note_lines,
)
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes
from automodel_ckpt.training.recipe import Recipe
from automodel_ckpt.training.resume import commits_of_run, pin_base

MAX_MEASURED = 200
"""Number of samples that are measured if the data set does not know their lengths."""


@dataclass(frozen=True)
class PreviewSample:
    """A sample in the order of training: its *number* in the data set, its tokens without padding, and their labels.

    *label* is the label of a sample without labels of tokens. It is empty for other samples.
    """

    number: int
    tokens: list[int]
    labels: list[int]
    label: str

    @property
    def num_labels(self) -> int:
        """The number of tokens that are trained on."""
        return sum(label != IGNORE_INDEX for label in self.labels)


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


def summary(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (title, text) about the training data of a recipe that :func:`built_data` returned."""
    dataset = recipe.dataloader.dataset
    if isinstance(dataset, TargetedDataset):
        # It has the same samples and packs as the data set that it wraps.
        dataset = dataset.dataset
    samples = dataset.dataset if isinstance(dataset, PackedDataset) else dataset
    is_known = isinstance(samples, TokenizedDataset)
    lengths = samples.summary if is_known else None
    is_partial = False
    if lengths is None:
        measured = list(first_samples(recipe, MAX_MEASURED))
        is_partial = len(measured) == MAX_MEASURED
        has_token_labels = not any(each.label for each in measured)
        lengths = LengthSummary.of(
            np.asarray([len(each.tokens) for each in measured], dtype=np.int64),
            sum(each.num_labels for each in measured) if has_token_labels else None,
        )
    yield "data", f"first {lengths.samples_text}" if is_partial else lengths.samples_text
    yield "lengths", lengths.lengths_text
    if not is_partial:
        yield "tokens", lengths.tokens_text
    if is_known:
        truncated, skipped = samples.counts[TRUNCATED], samples.counts[SKIPPED]
        yield "truncated", f"{truncated:,}, and {skipped:,} skipped"
    if isinstance(dataset, PackedDataset | PackedImages):
        waste = 100 * dataset.waste
        text = f"{len(dataset):,} of {dataset.size:,} tokens, {waste:.1f}% of them empty"
        yield "packs", text
    if is_known:
        if samples.template:
            yield "template", f"the assistant's tokens are found by {samples.template}"
        yield from (("warning", note) for note in note_lines(samples.counts))


def first_samples(recipe: Recipe, num_samples: int) -> Iterator[PreviewSample]:
    """Yield the first samples of the first epoch, collated as for training."""
    for batch in recipe.dataloader:
        start = 0
        for micro_batch in batch.micro_batches:
            owners = recipe.samples_of_rows(micro_batch)
            in_words = recipe.labels_in_words(micro_batch)
            mask = micro_batch.get("attention_mask")
            for index, owner in enumerate(owners):
                # A group that is not full is completed by a row without labels, which is no sample.
                if start + owner >= len(batch.sample_ids):
                    continue
                if num_samples == 0:
                    return
                num_samples -= 1
                keep = slice(None) if mask is None else mask[index].bool()
                number = batch.sample_ids[start + owner]
                tokens: list[int] = micro_batch["input_ids"][index][keep].tolist()
                if in_words:
                    yield PreviewSample(
                        number, tokens, [IGNORE_INDEX] * len(tokens), in_words[index]
                    )
                else:
                    labels = micro_batch["labels"][index][keep].tolist()
                    yield PreviewSample(number, tokens, labels, "")
            start += max(owners, default=-1) + 1
        if batch.last_of_epoch:
            return


def spans(preprocessor: Any, sample: PreviewSample) -> Iterator[tuple[str, bool]]:
    """Divide *sample* into (text, whether it is trained on)."""
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    start, before = 0, ""
    for is_trained, group in groupby(label != IGNORE_INDEX for label in sample.labels):
        end = start + len(list(group))
        # The text up to here minus the text before it: a tokenizer decodes the beginning of a text differently.
        whole = _decoded(tokenizer, sample.tokens[:end])
        text = whole.removeprefix(before)
        if not whole.startswith(before):
            text = _decoded(tokenizer, sample.tokens[start:end])
        yield text, is_trained
        start, before = end, whole


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens)) + " "
    return str(tokenizer.decode(tokens, skip_special_tokens=False))
