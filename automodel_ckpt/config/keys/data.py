"""The sections ``dataloader`` and ``packed_sequence``, and the rule for the names in ``validation_datasets``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    Condition,
    Rule,
    Target,
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
