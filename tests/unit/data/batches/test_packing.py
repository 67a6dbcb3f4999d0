from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_ckpt.data.batches.document_rows import DocumentRows, RowRules
from automodel_ckpt.data.batches.packing import (
    PackedDataset,
    RowLayout,
    best_fit_decreasing,
    longest_sample,
)
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import Stream

SMALL, LARGE = 8, 4096
"""Hidden sizes at which attention, or all else, is what a token costs."""


class Samples:
    """Sample i has the tokens 10 i, 10 i + 1, ... and no label on its first two."""

    def __init__(self, *lengths: int) -> None:
        self.each = [list(range(10 * i, 10 * i + length)) for i, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = self.each[index]
        return {"input_ids": tokens, "labels": [-100, -100, *tokens[2:]][: len(tokens)]}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 60))
def test_each_item_is_in_one_pack_and_no_pack_overflows(lengths: list[int], size: int) -> None:
    packs = best_fit_decreasing(lengths, size)
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    fills = [sum(lengths[item] for item in pack) for pack in packs]
    assert max(fills) <= size
    assert sum(fill <= size / 2 for fill in fills) <= 1


def test_positions_start_over_and_first_tokens_have_no_label() -> None:
    packed = PackedDataset(Samples(4, 3, 2), 7)
    assert packed[0] == {
        "input_ids": [0, 1, 2, 3, 10, 11, 12],
        "labels": [-100, -100, 2, 3, -100, -100, 12],
        "position_ids": [0, 1, 2, 3, 0, 1, 2],
    }
    assert len(packed) == 2
    assert packed.waste == pytest.approx(5 / 14)


def test_packs_are_collated_with_their_positions() -> None:
    batch = PadCollator(9)([PackedDataset(Samples(4, 3, 2), 7)[i] for i in range(2)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].sum().item() == 9
    assert longest_sample(batch) == 4


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(
        RecipeError,
        match=r"1 of \d samples; size 7, the longest, sample 1, has 8 tokens, the 99th percentile is 8",
    ):
        PackedDataset(Samples(4, 8), 7)
    with pytest.raises(RecipeError, match="an iterable data set cannot be packed"):
        PackedDataset(Stream(4), 7)
    pairs = [{"chosen": [1], "rejected": [2]}]
    with pytest.raises(RecipeError, match=r"lacks input_ids or labels(?s:.)*chosen"):
        PackedDataset(pairs, 7)
    with pytest.raises(RecipeError, match=r"lacks input_ids or labels(?s:.)*chosen"):
        DocumentRows(pairs, RowRules(7))


def collated(*lengths: int) -> dict[str, torch.Tensor]:
    samples = Samples(*lengths)
    return PadCollator(9)([samples[i] for i in range(len(samples))])


def content(batch: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """(position, token, label) of each labelled place, in the order of the tokens."""
    places = zip(
        *(batch[name].flatten().tolist() for name in ("position_ids", "input_ids", "labels")),
        strict=True,
    )
    return sorted((place for place in places if place[2] != -100), key=lambda place: place[1])


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (RowLayout(SMALL), (2, 6)),
        (RowLayout(LARGE), (1, 11)),
        (RowLayout(LARGE, multiple=8), (2, 6)),
        (RowLayout(SMALL, one_row=True), (1, 11)),
        (RowLayout(SMALL, one_row=True, multiple=8), (1, 16)),
    ],
)
def test_samples_share_the_cheapest_rows(layout: RowLayout, shape: tuple[int, int]) -> None:
    batch = layout(collated(6, 3, 2))
    assert "attention_mask" not in batch
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        batch, shape
    )
    assert content(batch) == [(i, i, i) for i in range(2, 6)] + [(2, 12, 12)]
    lengths = np.diff(np.flatnonzero(np.append(batch["position_ids"].numpy().flatten() == 0, True)))
    assert sorted(lengths[lengths > 1]) == [2, 3, 6]


def test_a_batch_without_padding_but_for_its_mask_or_with_other_tensors_stays_as_it_is() -> None:
    batches = (collated(5, 5), collated(6), collated(6, 2) | {"pixel_values": torch.zeros(2, 3)})
    for batch, one_row in itertools.product(batches, (False, True)):
        after = RowLayout(SMALL, one_row=one_row)(batch)
        hides = bool((batch["attention_mask"] == 0).any())
        assert after.keys() == batch.keys() - (set() if hides else {"attention_mask"})
        assert all(after[name] is batch[name] for name in after)
