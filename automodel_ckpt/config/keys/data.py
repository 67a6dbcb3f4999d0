"""The sections ``dataloader``, ``packed_sequence``, ``tokenizer`` and ``processor``: how samples become batches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    NOT_EMPTY,
    Condition,
    Rule,
    Target,
    needs,
    setting,
)

SET_NAMES = Rule(
    lambda given: all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in given),
    "a section of data sets by name, made of letters, digits, _ and -",
)


@dataclass
class DataloaderConfig:
    """How samples are batched."""

    shuffle: bool = True
    """Shuffle the samples in each epoch, with a seeded permutation."""
    num_workers: int = setting(0, AT_LEAST_0)
    """Worker processes per rank."""
    collate_fn: Target | None = field(
        default=None, metadata={"supplied": ("tokenizer", "processor")}
    )
    """The function that collates a list of samples into a batch, or its builder; null: pad to the longest sample."""
    drop_last: bool = False
    """Drop the last incomplete global batch of each epoch."""
    pad_to_multiple_of: int | None = setting(None, AT_LEAST_1)
    """Pad each row to a multiple of this many tokens, including rows with several samples."""
    padding_free: bool = True
    """Concatenate the samples of a micro-batch without padding if the model supports it; false: pad each one."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("pad_to_multiple_of",),
            ("collate_fn", "padding_free"),
            lambda section: section.collate_fn is None or section.padding_free,
            "rows made by collate_fn are not padded when padding_free is false",
            "pad to a multiple in your collate_fn, or remove the key",
        ),
    )


@dataclass
class PackedSequenceConfig:
    """Sequence packing. A pack counts as one sample in batch sizes. Without this section, samples are not packed."""

    size: int = setting(2048, AT_LEAST_1)
    """Maximum tokens per pack; at least the length of the longest sample."""
    strategy: Literal["best_fit"] = "best_fit"
    """Packing strategy: best_fit places samples, longest first, into the fullest pack that fits them."""


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
_REVISION = needs(
    "revision",
    "from_pretrained",
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
