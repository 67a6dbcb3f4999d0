"""Whether a teacher takes the tokens and pixels that the processor of the student makes of images."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedConfig

from automodel_ckpt.data.media.media import audio_processor_of
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
"""Vision towers whose image_size is that of the largest image."""
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
    differing: list[str] = []
    if student is not None:
        differing += _differing("config", student, teacher.config, (*_TOKENS, *_NUM_TOKENS))
        tower, other = _vision_config(student), _vision_config(teacher.config)
        is_limit = getattr(tower, "model_type", None) in _ANY_SIZE
        names = [name for name in _VISION if name != "image_size" or not is_limit]
        differing += _differing("vision_config", tower, other, names)
    own = _processor_of(teacher)
    if own is None:
        log.warning(
            "%s: %s has no processor, so how it expects pixels to be scaled is not compared",
            KEY,
            teacher.name,
        )
    else:
        of_teacher = getattr(own, "image_processor", None)
        of_student = getattr(processor, "image_processor", None)
        differing += _differing("image_processor", of_student, of_teacher, _PIXELS)
        audio_parts = audio_processor_of(processor), audio_processor_of(own)
        differing += _differing("feature_extractor", *audio_parts, _AUDIO)
    if differing:
        raise RecipeError(
            "the teacher expects other images than the student's processor makes",
            where=f"{KEY}.from_pretrained",
            value=f"{teacher.name}: {'; '.join(differing)}",
            hint="both models get the same tokens and pixels: use a teacher of the student's family whose settings of "
            "images are equal",
        )


def _differing(part: str, student: Any, teacher: Any, names: Sequence[str]) -> Iterator[str]:
    """Describe the settings *names* that both objects have with different values."""
    for name in names:
        values = [_plain(getattr(each, name, None)) for each in (student, teacher)]
        if None not in values and values[0] != values[1]:
            yield f"{part}.{name} is {values[1]}, the student has {values[0]}"


def _plain(value: Any) -> Any:
    """The value with lists in place of tuples, which JSON does not have."""
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _vision_config(config: PreTrainedConfig) -> Any:
    return getattr(config, "vision_config", None)


def _processor_of(teacher: PretrainedTeacher) -> Any:
    """The processor in the teacher's directory; None if it has none."""
    try:
        return read_processor(os.path.expanduser(teacher.name), teacher.repository)
    except Exception as error:  # damaged files make transformers raise anything
        log.debug("the teacher's processor cannot be read: %r", error)
        return None
