"""The size of the largest micro-batch of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from automodel_ckpt.data.media.image_packing import PACK_IDS

log = logging.getLogger("automodel_ckpt")

_OF_TEXT = frozenset(
    {
        "input_ids",
        "labels",
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "mm_token_type_ids",
        PACK_IDS,
    }
)


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """The rows of a micro-batch, the tokens of a row, and the inputs other than tokens, by name (images).

    Rows of an encoder-decoder have the tokens of a source, and *targets_per_row* tokens of a target.
    """

    rows: int
    tokens_per_row: int
    targets_per_row: int | None = None
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)


def micro_batch_shape(recipe: Any) -> MicroBatchShape | None:
    """The shape of a full micro-batch; None if it is unknown.

    Its samples are as long as the recipe allows. Their number of rows is that of the first micro-batch: a pair of
    answers has two. So is their length if they have images, or if the recipe does not determine it.
    """
    full = _full_micro_batch(recipe)
    has_images = hasattr(recipe, "processor")
    if full is not None and recipe.config.packed_sequence is not None and not has_images:
        return full
    batch = _first_micro_batch(recipe)
    if batch is None:
        return full
    rows, length = batch["input_ids"].shape
    targets = batch["labels"].shape[1] if _has_targets(recipe) else None
    if full is not None and PACK_IDS in batch:
        # The batch has a row per sample; the model gets packs.
        rows, length = full.rows, full.tokens_per_row
    if full is not None and not has_images:
        return replace(full, rows=max(rows, full.rows))
    images = {name: value for name, value in batch.items() if name not in _OF_TEXT}
    return MicroBatchShape(rows, length, targets, images)


def _first_micro_batch(recipe: Any) -> Mapping[str, torch.Tensor] | None:
    """The first samples of the training data, collated; None for streams, and samples that cannot be collated here."""
    loader = recipe.dataloader
    size = recipe.config.step_scheduler.local_batch_size
    try:
        samples = [loader.dataset[number] for number in range(size)]
        batch: Mapping[str, torch.Tensor] = loader.collate_fn(samples)
        rows, length = batch["input_ids"].shape
    except Exception as error:
        log.debug("the first samples make no micro-batch: %r", error)
        return None
    log.debug("the first micro-batch has %d rows of %d tokens", rows, length)
    return batch


def _full_micro_batch(recipe: Any) -> MicroBatchShape | None:
    """A full micro-batch without images; None if the recipe does not determine the length of samples."""
    packed, rows = recipe.config.packed_sequence, recipe.config.step_scheduler.local_batch_size
    arguments = recipe.config.dataset.kwargs
    length = packed.size if packed is not None else arguments.get("seq_length")
    if length is None:
        return None
    targets = None
    if _has_targets(recipe):
        limit = arguments.get("target_length")
        targets = int(length if limit is None else limit)
    return MicroBatchShape(rows, int(length), targets)


def _has_targets(recipe: Any) -> bool:
    """Whether the model has a decoder whose rows have another length than those of its encoder."""
    return bool(getattr(recipe.model_config, "is_encoder_decoder", False))
