"""The sections ``tokenizer`` and ``processor``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from automodel_ckpt.config.tree.rules import (
    NOT_EMPTY,
    Condition,
    Rule,
    setting,
)

_IMAGE_SIZES = {
    "size",
    "crop_size",
    "max_image_size",
    "min_pixels",
    "max_pixels",
    "max_soft_tokens",
}
_IMAGE_STEPS = {"resample", "do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_pad"}
_IMAGE_PARTS = {
    "do_convert_rgb",
    "do_image_splitting",
    "crop_to_patches",
    "min_patches",
    "max_patches",
}
_PAN_AND_SCAN = {"do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"}
_IMAGE_TOKENS = {"image_seq_length", "image_seq_len", "padding_side", "use_fast"}
PROCESSOR_SETTINGS = frozenset(
    _IMAGE_SIZES | _IMAGE_STEPS | _IMAGE_PARTS | _PAN_AND_SCAN | _IMAGE_TOKENS
)
"""Settings of processors, for images and padding, that a recipe may override. None of them names code or a file."""
PROCESSOR_OPTIONS = Rule(
    lambda given: set(given) <= PROCESSOR_SETTINGS,
    f"a section of settings out of {', '.join(sorted(PROCESSOR_SETTINGS))}",
)
_REVISION = Condition(
    ("revision",),
    ("from_pretrained",),
    lambda section: section.from_pretrained is not None,
    "the model's own one has the revision of the model",
    "set model.revision, or set from_pretrained in this section, too",
)


@dataclass
class TokenizerConfig:
    """The tokenizer. Set tokenizer: null for data that is already tokenized."""

    from_pretrained: str | None = setting(None, NOT_EMPTY)
    """Directory or Hub name of a tokenizer; null uses the model's tokenizer."""
    revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in from_pretrained; null: the main branch."""

    conditions: ClassVar[tuple[Condition, ...]] = (_REVISION,)


@dataclass
class ProcessorConfig:
    """The processor, which prepares text and images for a vision-language model."""

    from_pretrained: str | None = setting(None, NOT_EMPTY)
    """Directory or Hub name of a processor; null uses the model's processor."""
    revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in from_pretrained; null: the main branch."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata={"rules": (PROCESSOR_OPTIONS,)})
    """Settings of the processor to override, such as min_pixels, max_pixels, size or padding_side."""

    conditions: ClassVar[tuple[Condition, ...]] = (_REVISION,)
