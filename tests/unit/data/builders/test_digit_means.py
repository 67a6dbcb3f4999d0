"""The teacher that compares images with the mean of each digit."""

from __future__ import annotations

import pytest
import torch

from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.examples.data.digit_means import digit_means
from automodel_ckpt.examples.data.digits import processor, scans


@pytest.fixture(autouse=True)
def _needs_sklearn() -> None:
    """Skip tests without scikit-learn. Workers that only collect them do not import it."""
    pytest.importorskip("sklearn")


def test_it_recognizes_held_out_scans_and_finds_the_image_of_each_answer() -> None:
    teacher = digit_means(300)
    images = processor(300)
    data = scans(images, "validation", max_samples=40)
    collate = ImageTextCollator(images)
    question = collate.unlabeled(data.image(0), "Which?")
    # A row without an answer has an image, too.
    batch = collate([question, *(data[index] for index in range(40))])
    labels = batch.pop("labels")
    logits = teacher(**batch)
    assert logits.shape == (*labels.shape, len(images.tokenizer))
    predicted = logits[:, :-1].argmax(-1)
    is_label = labels[:, 1:] != -100
    hits = (predicted == labels[:, 1:])[is_label].view(40, 2).sum(0).tolist()
    # The digit, and the end.
    assert hits[0] >= 34 and hits[1] == 40
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    # Two conversations in one row.
    row = torch.cat([batch["input_ids"][3:4], batch["input_ids"][7:8]], dim=1)
    packed = teacher(input_ids=row, pixel_values=batch["pixel_values"][[3, 7]])
    width = batch["input_ids"].shape[1]
    for part, number in ((packed[:, :width], 3), (packed[:, width:], 7)):
        torch.testing.assert_close(part[0], logits[number])
