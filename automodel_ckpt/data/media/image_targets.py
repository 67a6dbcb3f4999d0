"""How the cache of a teacher's predictions recognizes conversations with images, alone or in packs."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from automodel_ckpt.data.collate import IGNORE_INDEX
from automodel_ckpt.data.image_collate import check_conversation
from automodel_ckpt.data.media.image_conversations import ImageText
from automodel_ckpt.data.media.image_packing import ImagePack, processor_fingerprint
from automodel_ckpt.data.samples.teacher_targets import SampleKind, samples_digest


def image_samples(processor: Any) -> SampleKind:
    """Return the kind of samples that *processor* turns into tokens and pixels."""
    return SampleKind(partial(_digest, processor), _checksum, _label_counts)


def _digest(processor: Any, dataset: Any) -> str:
    """Return a digest of a data set and the processor: of its ``fingerprint()``, else of all its samples.

    The content of an image file that a row names is not part of a fingerprint: the checksum of the sample shows it.
    """
    source = dataset
    # Packs and measured samples contain the data set that they are made of.
    while not hasattr(source, "fingerprint") and hasattr(source, "dataset"):
        source = source.dataset
    fingerprint = getattr(source, "fingerprint", None)
    samples = fingerprint() if fingerprint else samples_digest(dataset, _checksum)
    packs = (len(dataset), getattr(dataset, "size", None))
    key = (samples, packs, processor_fingerprint(processor), transformers.__version__)
    return hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()


def _conversations(sample: Any) -> list[ImageText]:
    """The conversations of a sample or a pack. Raises :class:`RecipeError` for a sample of another class."""
    found = sample.samples if isinstance(sample, ImagePack) else [sample]
    for each in found:
        check_conversation(each)
    return list(found)


def _checksum(sample: Any) -> int:
    """Compute a checksum of the texts, the labels, the pixels and the audio of a sample (CRC-32)."""
    found = 0
    for each in _conversations(sample):
        text = repr((each.text, each.labeled_spans, each.seq_length, each.truncation))
        found = zlib.crc32(text.encode(), found)
        for image in each.images:
            found = zlib.crc32(f"{image.mode} {image.size}".encode(), found)
            found = zlib.crc32(image.tobytes(), found)
        for audio in each.audios:
            found = zlib.crc32(audio.tobytes(), found)
    return found


def _label_counts(samples: Sequence[Any], micro_batch: Mapping[str, torch.Tensor]) -> list[int]:
    """Count the labels of the rows of each sample. The number of its tokens is not known without its images."""
    is_label = micro_batch["labels"][:, 1:] != IGNORE_INDEX
    # A last row with a blank image, if there is one, has no label.
    by_row: list[int] = is_label.sum(1).tolist()
    counts = []
    start = 0
    for sample in samples:
        end = start + len(_conversations(sample))
        counts.append(sum(by_row[start:end]))
        start = end
    return counts
