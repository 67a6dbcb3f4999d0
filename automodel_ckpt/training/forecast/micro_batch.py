"""The size of the largest micro-batch of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from automodel_ckpt.data.media.image_packing import PACK_IDS

log = logging.getLogger("automodel_ckpt")

_OF_TEXT = {"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"}
_OF_TEXT |= {"mm_token_type_ids", PACK_IDS}


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
    """The shape of a full micro-batch. Returns None when it is unknown.

    Its samples are as long as the recipe allows. Their number of rows is taken from the first micro-batch: a pair of
    answers has two. Their length is also taken from it if they have images, or if the recipe does not determine it.
    """
    packed, rows = recipe.config.packed_sequence, recipe.config.step_scheduler.local_batch_size
    arguments = recipe.config.dataset.kwargs
    longest = packed.size if packed is not None else arguments.get("seq_length")
    has_targets = getattr(recipe.model_config, "is_encoder_decoder", False)
    target_length = (arguments.get("target_length") or longest) if has_targets else None
    has_images = hasattr(recipe, "processor")
    is_known = longest is not None and packed is not None and not has_images
    batch = None if is_known else _first_micro_batch(recipe)
    if batch is None:
        return None if longest is None else MicroBatchShape(rows, int(longest), target_length)
    if longest is not None and not has_images:
        rows = max(rows, len(batch["input_ids"]))
        return MicroBatchShape(rows, int(longest), target_length)
    length = batch["input_ids"].shape[1]
    if longest is None or PACK_IDS not in batch:
        # A batch of packs has a row per sample; the model gets packs.
        rows, longest = len(batch["input_ids"]), length
    images = {name: value for name, value in batch.items() if name not in _OF_TEXT}
    targets = batch["labels"].shape[1] if has_targets else None
    return MicroBatchShape(rows, int(longest), targets, images)


def _first_micro_batch(recipe: Any) -> Mapping[str, torch.Tensor] | None:
    """The first samples of the training data, collated.

    Returns None for streams, and for samples that cannot be collated here.
    """
    loader = recipe.dataloader
    try:
        size = recipe.config.step_scheduler.local_batch_size
        samples = [loader.dataset[number] for number in range(size)]
        batch: Mapping[str, torch.Tensor] = loader.collate_fn(samples)
        log.debug("the first micro-batch has rows %s", list(batch["input_ids"].shape))
    except Exception as error:
        log.debug("the first samples make no micro-batch: %r", error)
        return None
    return batch
