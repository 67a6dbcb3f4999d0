"""Pad token lists of different lengths to a micro-batch; and the arguments that several builders of data sets have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.base.labels import IGNORE_INDEX as IGNORE_INDEX
from automodel_ckpt.errors import RecipeError

OTHER_RUN = (
    "set what the checkpoint has, or start another run (checkpoint.checkpoint_dir) with init_from"
)


class RowOptions(TypedDict, total=False):
    """Which rows a builder reads, and when. :data:`ROW_DEFAULTS` has the defaults."""

    max_samples: int | None
    name: str | None
    split: str
    revision: str | None
    streaming: bool
    shuffle_block: int


ROW_DEFAULTS = RowOptions(
    max_samples=None, name=None, split="train", revision=None, streaming=False, shuffle_block=1000
)


def at_most(max_samples: int | None, num_samples: int) -> int:
    """Return the smaller of both numbers; None is no limit. Raises :class:`RecipeError` if *max_samples* is below 1."""
    if max_samples is None:
        return num_samples
    require_range("max_samples", max_samples, 1)
    return min(num_samples, max_samples)


def require_range(
    name: str, value: float, least: float, most: float = math.inf, *, section: str = "dataset"
) -> None:
    """Raise :class:`RecipeError` unless *value*, the argument *name*, is from *least* to *most*."""
    if not (math.isfinite(value) and least <= value <= most):
        bounds = f"{least} or more" if most == math.inf else f"from {least} to {most}"
        what = f"{name} is out of range: it must be {bounds}"
        raise RecipeError(what, where=f"{section}.{name}", value=value, hint="")


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return *tokenizer*; raise :class:`RecipeError` if it is None."""
    if tokenizer is None:
        raise RecipeError(
            "text data requires a tokenizer, but the recipe has none",
            where="tokenizer",
            value="none",
            hint="set tokenizer.from_pretrained to a directory or Hub name; "
            "only model.from_pretrained provides one, not a model with _target_ or from_config",
        )
    return tokenizer


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise :class:`RecipeError` unless *value*, the data set's argument *name*, is one of *choices*."""
    if value not in choices:
        what = f"unknown value for {name}"
        known = f"{value} (known: {', '.join(choices)})"
        raise RecipeError(what, where=f"dataset.{name}", value=known, hint="")


Integers = npt.NDArray[np.int64]
Batch = dict[str, torch.Tensor]
Ids = list[int]
"""The ids of the tokens of a text, or other numbers for each of them."""
Key = tuple[object, ...]
"""What prepared data depend on: the key of a cache, or a part of it."""
Tensors = Mapping[str, torch.Tensor]
Sample = dict[str, list[int]]
"""The ``input_ids`` and ``labels`` of a sample, and further lists of their length."""
AnySample = Mapping[str, Sequence[int]]
"""A sample as data sets of users return it."""
Where = Callable[[], str]
"""Returns the location of a sample, for an error message."""
Item = Mapping[str, Any]
"""A row or a sample with any fields."""
State = dict[str, Any]
"""A state as checkpoints store it."""


class PadCollator:
    """Pads token lists on the right to the length of the longest.

    The argument is a non-empty list of ``{"input_ids": list[int], "labels": list[int]}``; labels are not shifted, and
    have the length of the tokens. Returns int64 tensors ``input_ids``, ``attention_mask`` and ``labels`` of shape
    [samples, length], where length is rounded up to a multiple of *pad_to_multiple_of*. Padding has mask 0 and label
    -100. Packs also have ``position_ids``, with position 0 for padding. Raises :class:`RecipeError` for other samples.
    """

    # A promise: no generator is seeded per sample, so numbers drawn here would not repeat on
    # resume.
    draws_nothing = True

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self.multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        require_range("pad_to_multiple_of", self.multiple, 1, section="dataloader")
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[AnySample]) -> Batch:
        for sample in samples:
            _check(sample)
        padding = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORE_INDEX}
        if "position_ids" in samples[0]:
            padding["position_ids"] = 0
        return padded(samples, padding, self.multiple)


def padded(
    samples: Sequence[Mapping[str, Any]], padding: Mapping[str, int], multiple: int
) -> Batch:
    """Make int64 tensors [samples, length] of the lists that *padding* names, with its values behind them.

    Length is the length of the longest ``input_ids``, rounded up to a *multiple*. A list that a sample lacks has ones.
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    shape = (len(samples), -(-longest // multiple) * multiple)
    batch = {}
    for name, filler in padding.items():
        array = np.full(shape, filler, dtype=np.int64)
        for row, sample in zip(array, samples, strict=True):
            values = 1 if name == "attention_mask" else sample.get(name, 1)
            row[: len(sample["input_ids"])] = values
        batch[name] = torch.from_numpy(array)
    return batch


def check_unpadded(sample: AnySample) -> None:
    """Raise :class:`RecipeError` if the sample's own attention mask hides some of its tokens."""
    mask = sample.get("attention_mask", [])
    if not all(mask):
        raise RecipeError(
            "a sample is already padded: tokens that its attention_mask hides would be treated as data",
            where="dataset",
            value=f"{list(map(bool, mask)).count(False)} of {len(mask)} tokens",
            hint="remove the padding (each batch is padded as needed), or set dataloader.collate_fn",
        )


def require_index(index: int, size: int) -> None:
    """Raise IndexError unless *index* is from 0 to *size* - 1, which also ends an iteration without ``__iter__``."""
    if not 0 <= index < size:
        raise IndexError(index)


def require_keys(sample: object, *names: str) -> None:
    """Raise :class:`RecipeError` unless a sample is a mapping with these keys."""
    keys = list(map(str, sample)) if isinstance(sample, Mapping) else []
    if not set(names) <= set(keys):
        found = ", ".join(sorted(keys)) or type(sample).__name__
        raise unusable_sample(f"a sample lacks {' or '.join(names)}", found)


def unusable_sample(what: str, value: object) -> RecipeError:
    """Make the error for a sample that a recipe cannot train on."""
    return RecipeError(
        what,
        where="dataset",
        value=value,
        hint="use a builder for this recipe (docs/reference/data.md), return the samples that it describes, or set "
        "dataloader.collate_fn",
    )


def _check(sample: AnySample) -> None:
    require_keys(sample, "input_ids", "labels")
    check_unpadded(sample)
    lengths = {name: len(sample[name]) for name in ("input_ids", "labels")}
    if lengths["input_ids"] != lengths["labels"] or lengths["input_ids"] == 0:
        what = "input_ids and labels of a sample must have the same length and must not be empty"
        raise unusable_sample(what, lengths)
