"""What the cache of a teacher's predictions knows of conversations with images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from automodel_ckpt.data.media.image_conversations import ImageText
from automodel_ckpt.data.media.image_packing import ImagePack, MeasuredImages, PackedImages
from automodel_ckpt.data.media.image_targets import image_samples
from automodel_ckpt.data.samples.teacher_targets import (
    SampleTargets,
    TargetCollator,
    Targeted,
    TargetedDataset,
)
from automodel_ckpt.errors import RecipeError
from tests.support.models.vision import llava


def conversation(red: int, text: str = "a question") -> ImageText:
    return ImageText(text, [Image.new("RGB", (4, 4), (red, 0, 0))], [(2, 5)])


class Listed(list[Any]):
    """A list with a fingerprint."""

    version = 1

    def fingerprint(self) -> tuple[object, ...]:
        return ("listed", self.version)


KIND = image_samples(llava()[1])


def test_a_checksum_changes_with_the_text_the_labels_and_the_pixels() -> None:
    one = conversation(1)
    others = [
        conversation(2),
        conversation(1, "another one"),
        replace(one, labeled_spans=[(2, 6)]),
        replace(one, seq_length=8),
        replace(one, images=[Image.new("RGB", (2, 8), (1, 0, 0))]),
        ImagePack([one, one], [3, 3]),
    ]
    found = {KIND.checksum(each) for each in (one, *others)}
    assert len(found) == 1 + len(others)
    assert KIND.checksum(conversation(1)) == KIND.checksum(replace(one, where="elsewhere"))
    with pytest.raises(RecipeError, match="is not a conversation with images"):
        KIND.checksum({"input_ids": [1]})


def test_a_digest_changes_with_the_data_the_packs_and_the_processor() -> None:
    known, plain = Listed([conversation(1)]), [conversation(1)]
    changed = Listed(known)
    changed.version = 2
    packs = [PackedImages(MeasuredImages(known, np.array([5])), size) for size in (8, 9)]
    other = llava()[1]
    other.image_processor.image_mean = [0.5, 0.5, 0.5]
    found = [KIND.digest(each) for each in (known, changed, plain, [conversation(2)], *packs)]
    found.append(image_samples(other).digest(known))
    assert len(set(found)) == len(found)
    assert KIND.digest(Listed([conversation(7)])) == found[0]


def test_the_labels_of_a_sample_are_those_of_its_rows() -> None:
    labels = torch.full((4, 5), -100)
    labels[0, 2:4] = labels[1, 1] = labels[2, 4] = 7
    # The first token of a row predicts nothing; the last row has a blank image.
    labels[2, 0] = 7
    pack = ImagePack([conversation(1), conversation(2)], [5, 5])
    assert KIND.label_counts([pack, conversation(3)], {"labels": labels}) == [3, 1]


def test_a_collator_gets_the_samples_and_must_make_the_labels_that_the_teacher_saw() -> None:
    targets = SampleTargets(torch.zeros(1, 2).int().numpy(), *[torch.zeros(1, 2).numpy()] * 2, 0)
    made: list[Any] = []

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        made.extend(samples)
        return {"labels": torch.tensor([[-100, 5, 6]])}

    sample = conversation(1)
    with pytest.raises(RecipeError, match="changes the labels") as raised:
        TargetCollator(collate)([Targeted(sample, targets)])
    assert made == [sample]
    assert "2 labels in a micro-batch of samples with 1" in str(raised.value)
    assert TargetedDataset([sample], KIND)[0] is sample
