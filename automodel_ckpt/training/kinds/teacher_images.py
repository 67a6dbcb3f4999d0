"""Whether a teacher takes the tokens and pixels that the processor of the student makes of images."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedConfig

from automodel_ckpt.data.media.media_files import audio_processor_of
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.processor import read_processor
from automodel_ckpt.training.kinds.teacher import KEY, PretrainedTeacher

log = logging.getLogger("automodel_ckpt")

_TOKENS = (
    "image_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "boi_token_id",
    "eoi_token_id",
    "audio_token_id",
)
_NUM_TOKENS = (
    "mm_tokens_per_image",
    "scale_factor",
    "spatial_merge_size",
    "downsample_ratio",
    "vision_feature_select_strategy",
    "image_grid_pinpoints",
)
"""Settings of models with which the number of tokens of an image changes."""
_VISION = (
    "image_size",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "pooling_kernel_size",
    "num_channels",
    "in_channels",
)
"""Settings of vision towers with which the shape of the pixels or the number of their patches changes."""
_ANY_SIZE = frozenset({"pixtral"})
"""Vision towers with the size of the largest image as their image_size."""
_PIXELS = (
    "model_input_names",
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)
"""Settings of image processors with which the same image has other tensors. Limits of its size are none of them."""

_AUDIO = ("model_input_names", "sampling_rate", "feature_size", "hop_length", "n_fft", "n_samples")
"""Settings of feature extractors with which the same audio has other tensors."""


def check_images(
    teacher: PretrainedTeacher, student: PreTrainedConfig | None, processor: Any
) -> None:
    """Raise :class:`RecipeError` if *teacher* expects other images than *processor* makes for the *student*.

    Only the processor is compared for a student by ``_target_``, which has no configuration.
    """
    compared: list[tuple[str, Any, Any, Sequence[str]]] = []
    if student is not None:
        towers = [getattr(each, "vision_config", None) for each in (student, teacher.config)]
        is_limit = getattr(towers[0], "model_type", None) in _ANY_SIZE
        compared = [
            ("config", student, teacher.config, (*_TOKENS, *_NUM_TOKENS)),
            ("vision_config", towers[0], towers[1], _VISION[is_limit:]),
        ]
    try:
        own = read_processor(os.path.expanduser(teacher.name), teacher.repository)
    except Exception as error:  # damaged files make transformers raise anything
        log.debug("the teacher's processor cannot be read: %r", error)
        log.warning(
            "%s: %s has no processor, so how it expects pixels to be scaled is not compared",
            KEY,
            teacher.name,
        )
    else:
        images = [getattr(each, "image_processor", None) for each in (processor, own)]
        compared += [
            ("image_processor", images[0], images[1], _PIXELS),
            ("feature_extractor", audio_processor_of(processor), audio_processor_of(own), _AUDIO),
        ]
    differing = [text for row in compared for text in _differing(*row)]
    if differing:
        raise RecipeError(
            "the teacher expects other images than the student's processor makes",
            where=f"{KEY}.from_pretrained",
            value=f"{teacher.name}: {'; '.join(differing)}",
            hint="both models get the same tokens and pixels: use a teacher of the student's family with the same "
            "settings of images",
        )


def _differing(part: str, student: Any, teacher: Any, names: Sequence[str]) -> Iterator[str]:
    """Describe the settings *names* that both objects have with different values."""
    for name in names:
        # JSON has lists in place of tuples.
        texts = [json.dumps(getattr(each, name, None), default=str) for each in (student, teacher)]
        ours, its = map(json.loads, texts)
        if None not in (ours, its) and ours != its:
            yield f"{part}.{name} is {texts[1]}, the student has {texts[0]}"
