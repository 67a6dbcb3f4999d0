"""Packs of conversations with images: samples that share a row, with the tensors of their images in the same order.

The number of tokens of a sample is known only after its images are processed, so all samples are measured once before
training. The result is cached. A micro-batch contains the samples of its packs, padded, and :data:`PACK_IDS`;
:class:`ImageRowLayout` arranges them in rows where the model is available, because some models compute the positions
of image tokens.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset

from automodel_ckpt.base.units import counted, counted_are
from automodel_ckpt.data.batches.micro_batches import Failure, read_all
from automodel_ckpt.data.batches.packing import (
    PackedDataset,
    Packs,
    check_has_length,
    gathered,
    laid_out,
    tokens_of_rows,
)
from automodel_ckpt.data.collate import Batch, Ids, Integers, Tensors
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media.image_conversations import ImageText
from automodel_ckpt.data.rows.files import digest
from automodel_ckpt.data.rows.preparation import progress
from automodel_ckpt.data.samples.samples import cached
from automodel_ckpt.errors import AutomodelError, RecipeError

log = logging.getLogger(__name__)

PACK_IDS = "pack_ids"
"""Key of a tensor [samples] with the number of the row that each sample of a micro-batch belongs to."""
_FORMAT = 2
"""Part of the cache's keys. Increase it when the measured lengths of the same data change."""


@dataclass(frozen=True)
class ImagePack:
    """Samples that share a row, with the numbers of tokens that they had when they were measured."""

    samples: list[ImageText]
    lengths: Ids


class MeasuredImages:
    """A data set of :class:`ImageText` with known numbers of tokens, without the samples that are skipped."""

    def __init__(self, dataset: Any, lengths: Integers) -> None:
        """*lengths* are the lengths of all samples of *dataset*, 0 for samples that are skipped."""
        self.dataset = dataset
        self.numbers = np.flatnonzero(lengths)
        self.lengths = lengths[self.numbers]
        if not len(self.numbers):
            raise RecipeError(
                "no sample is left to pack",
                where="dataset.truncation",
                value=f"{counted_are(len(lengths), 'sample')} longer than dataset.seq_length",
                hint="",
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> ImageText:
        sample: ImageText = self.dataset[int(self.numbers[index])]
        return sample


class PackedImages(PackedDataset):
    """A map-style data set in which sample i is an :class:`ImagePack` of at most *size* tokens.

    Raises :class:`RecipeError` for a sample of more than *size* tokens.
    """

    def __init__(self, dataset: MeasuredImages, size: int) -> None:
        super().__init__(dataset, size)
        self.lengths = dataset.lengths

    def __getitem__(self, index: int) -> ImagePack:  # type: ignore[override]
        numbers = self.packs[index]
        samples = [self.dataset[number] for number in numbers]
        return ImagePack(samples, [int(self.lengths[number]) for number in numbers])


@dataclass(frozen=True)
class PackCollator:
    """Collates :class:`ImagePack` to the tensors of :class:`ImageTextCollator`, one row per sample, and PACK_IDS.

    Raises :class:`RecipeError` if a sample no longer has the number of tokens that was measured.
    """

    collate: ImageTextCollator

    def __call__(self, packs: Sequence[ImagePack]) -> Batch:
        samples: list[ImageText] = []
        lengths: Ids = []
        pack_ids: Ids = []
        for number, pack in enumerate(packs):
            samples += pack.samples
            lengths += pack.lengths
            pack_ids += [number] * len(pack.samples)
        batch = self.collate(samples)
        found: Ids = batch["attention_mask"].sum(1).tolist()
        for sample, measured, length in zip(samples, lengths, found, strict=False):
            if measured != length:
                raise RecipeError(
                    "a sample has another number of tokens than when the packs were made",
                    where=sample.where,
                    value=f"{length}, measured: {measured}",
                    hint="an image file has changed since: put it back, or start again with another "
                    "AUTOMODEL_CKPT_CACHE",
                )
        if len(found) > len(samples):
            # A blank image, which lets the vision tower run. The shortest row has most space for it.
            fills = [sum(pack.lengths) for pack in packs]
            pack_ids.append(fills.index(min(fills)))
        return {**batch, PACK_IDS: torch.tensor(pack_ids)}


PositionsOf = Callable[[Tensors], torch.Tensor]
"""Computes the rotary positions [3, samples, L] of a padded batch, in models where they depend on the images."""


@dataclass(frozen=True)
class ImageRowLayout:
    """Arranges the samples of packs in the rows of one forward pass, for a model that separates samples in a row.

    ``position_ids`` restart at 0 with each sample; with *positions_of*, they are [4, rows, length]: the positions of
    the text, and the model's three rotary positions. With *one_row*, all packs are in one row, as flash attention
    requires. *multiple* rounds the row length up. *marks_tokens* adds the mask IS_TOKEN if some positions have no
    token.
    """

    positions_of: PositionsOf | None = None
    one_row: bool = False
    multiple: int = 1
    marks_tokens: bool = False

    def __call__(self, batch: Tensors) -> Batch:
        """Arrange a *batch* of :class:`PackCollator`; others are returned unchanged.

        The tensors with a value for each token become [rows, length], without ``attention_mask``. Those of images stay
        as they are: the rows have the images in the same order. The sum of the losses over the labels does not change.
        """
        if PACK_IDS not in batch:
            return dict(batch)
        lengths = batch["attention_mask"].count_nonzero(1)
        # The samples in the rows have the order of the images' tensors.
        pack_ids = batch[PACK_IDS].tolist()
        rows: Packs = [[] for _ in range(1 if self.one_row else max(pack_ids) + 1)]
        for sample, pack in enumerate(pack_ids):
            rows[0 if self.one_row else pack].append(sample)
        longest = max(int(lengths[row].sum()) for row in rows)
        width = -(-longest // self.multiple) * self.multiple
        rest = {name: tensor for name, tensor in batch.items() if name != PACK_IDS}
        arranged = laid_out(rest, rows, width, self.marks_tokens)
        if self.positions_of is not None:
            taken = tokens_of_rows(batch["attention_mask"].numpy() != 0, rows, width)
            rotary = [gathered(each.numpy(), taken, 0) for each in self.positions_of(batch)]
            arranged["position_ids"] = torch.stack([arranged["position_ids"], *rotary])
        return arranged


def measure(dataset: Any, collate: ImageTextCollator, num_workers: int = 0) -> MeasuredImages:
    """Count the tokens of all samples of *dataset*, in *num_workers* processes or in this one for 0; cached.

    The cache is used for a data set with a method ``fingerprint()``. Raises :class:`RecipeError` for a data set without
    a length, for samples that are not :class:`ImageText`, and for unusable or too long samples.
    """
    check_has_length(dataset)
    fingerprint = getattr(dataset, "fingerprint", None)
    if fingerprint is None:
        return MeasuredImages(dataset, _lengths(dataset, collate, num_workers))

    def build(directory: Path) -> None:
        np.save(directory / "lengths.npy", _lengths(dataset, collate, num_workers))

    digest = processor_fingerprint(collate.processor)
    key = (_FORMAT, fingerprint(), digest, transformers.__version__)
    # np.load rejects pickled objects by default.
    return MeasuredImages(dataset, np.load(cached("image_lengths", key, build) / "lengths.npy"))


def _lengths(dataset: Any, collate: ImageTextCollator, num_workers: int) -> Integers:
    num_samples = counted(len(dataset), "sample")
    log.info("counting the tokens of %s with images, to pack them", num_samples)
    # torch warns about more workers than cores, and they would not be faster.
    num_workers = min(num_workers, len(os.sched_getaffinity(0)))
    lengths = np.zeros(len(dataset), dtype=np.int64)
    show = progress("images", len(dataset))
    found = read_all(_Measuring(dataset, collate), range(len(dataset)), num_workers)
    for number, length in enumerate(found):
        lengths[number] = length
        show(1)
    return lengths


class _Measuring(Dataset[Any]):
    """A map-style data set of the numbers of tokens of another one's samples."""

    def __init__(self, dataset: Any, collate: ImageTextCollator) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, number: int) -> int | Failure:
        try:
            return self.collate.num_tokens(self.dataset[number])
        except AutomodelError as error:
            # Not raised: torch would replace it in the rank by an error with a traceback as its only argument.
            return Failure(error)


def processor_fingerprint(processor: Any) -> str:
    """Return a digest of the files that a processor is saved as."""
    with TemporaryDirectory() as directory:
        processor.save_pretrained(directory)
        paths = sorted(Path(directory).rglob("*"))
        contents = [f"{path.name} {digest(path)}" for path in paths if path.is_file()]
    return hashlib.blake2b("\n".join(contents).encode(), digest_size=16).hexdigest()
