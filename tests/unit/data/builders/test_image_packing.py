"""Measuring and packing conversations with images: what is skipped, cached and rejected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from automodel_ckpt.data.batches.packing import IS_TOKEN
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media.image_packing import (
    PACK_IDS,
    ImageRowLayout,
    PackCollator,
    PackedImages,
    measure,
)
from automodel_ckpt.data.vlm import conversations
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import image_token_ids
from tests.support.models.vision import qwen2_5_vl, write_conversations


@pytest.fixture(scope="module")
def collate() -> ImageTextCollator:
    """It makes 4 tokens of the images of the data, and more of larger ones; samples have 13 or 19 tokens."""
    config, processor = qwen2_5_vl()
    processor.image_processor.size["longest_edge"] = 1024
    return ImageTextCollator(processor, image_token_ids(config, processor))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AUTOMODEL_CKPT_CACHE", str(tmp_path / "cache"))
    return str(write_conversations(tmp_path, 10))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pack_contains_whole_samples_of_at_most_its_size(
    num_workers: int, data: str, collate: ImageTextCollator
) -> None:
    dataset = conversations(collate.processor, data)
    measured = measure(dataset, collate, num_workers)
    single = [int(collate([sample])["attention_mask"][0].sum()) for sample in dataset]
    assert measured.lengths.tolist() == single
    packs = PackedImages(measured, 60)
    assert sorted(number for pack in packs.packs for number in pack) == list(range(10))
    for pack in packs:
        assert sum(pack.lengths) <= 60
    batch = PackCollator(collate)([packs[0], packs[1]])
    num_samples = len(packs.packs[0]) + len(packs.packs[1])
    assert batch[PACK_IDS].tolist() == [0] * len(packs.packs[0]) + [1] * len(packs.packs[1])
    assert len(batch["labels"]) == num_samples


def test_rows_have_positions_that_restart_and_no_label_on_first_tokens(
    data: str, collate: ImageTextCollator
) -> None:
    packs = PackedImages(measure(conversations(collate.processor, data), collate), 60)
    batch = PackCollator(collate)([packs[0]])
    first, second = packs[0].lengths[:2]
    batch["labels"] = batch["input_ids"].clone()
    rows = ImageRowLayout(multiple=64, marks_tokens=True)(batch)
    assert rows["input_ids"].shape == rows["labels"].shape == rows[IS_TOKEN].shape == (1, 64)
    positions = rows["position_ids"][0].tolist()
    assert positions[: first + second] == [*range(first), *range(second)]
    assert rows["labels"][0, 0] == rows["labels"][0, first] == -100
    assert rows["labels"][0, 1:first].tolist() == rows["input_ids"][0, 1:first].tolist()
    assert int(rows[IS_TOKEN].sum()) == sum(packs[0].lengths)
    assert torch.equal(rows["pixel_values"], batch["pixel_values"])


@pytest.mark.parametrize("truncation", ["skip", "right"])
def test_samples_that_are_skipped_are_in_no_pack(
    truncation: Any, data: str, collate: ImageTextCollator
) -> None:
    dataset = conversations(collate.processor, data, seq_length=16, truncation=truncation)
    measured = measure(dataset, collate)
    assert len(measured) == (2 if truncation == "skip" else 10)
    assert measured.lengths.max() <= 16
    packs = PackedImages(measured, 40)
    labels = PackCollator(collate)(list(packs))["labels"]
    assert len(labels) in (len(measured), len(measured) + 1), "perhaps a blank image"
    assert (labels[: len(measured)] >= 0).any(1).all()


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 18, "a sample is longer than a pack"),
        ({"seq_length": 18}, 40, "a sample is longer than seq_length"),
        ({"seq_length": 3, "truncation": "skip"}, 40, "no sample is left to pack"),
    ],
)
def test_samples_that_fit_no_pack_are_rejected_before_training(
    options: dict[str, Any], size: int, message: str, data: str, collate: ImageTextCollator
) -> None:
    with pytest.raises(RecipeError, match=message):
        PackedImages(measure(conversations(collate.processor, data, **options), collate), size)


def test_an_image_that_changed_after_it_was_measured_is_reported(
    data: str, collate: ImageTextCollator
) -> None:
    dataset = conversations(collate.processor, data)
    packs = PackedImages(measure(dataset, collate), 200)
    larger = np.full((16, 64, 3), 9, dtype=np.uint8)
    Image.fromarray(larger).save(dataset.folder / "0.png")
    with pytest.raises(RecipeError, match="another number of tokens") as caught:
        PackCollator(collate)(list(packs))
    assert "sample 0 of" in str(caught.value)
