import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automodel_ckpt.data.batches.document_lane import DocumentRows, RowRules
from automodel_ckpt.data.batches.packing import PackedDataset, best_fit_decreasing
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


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"1 of \d samples; size 7, the longest, sample 1, has 8 tokens"
    ):
        PackedDataset(Samples(4, 8), 7)
    with pytest.raises(RecipeError, match="an iterable data set cannot be packed"):
        PackedDataset(Stream(4), 7)
    pairs = [{"chosen": [1], "rejected": [2]}]
    with pytest.raises(RecipeError, match=r"lacks input_ids or labels(?s:.)*chosen"):
        PackedDataset(pairs, 7)
    with pytest.raises(RecipeError, match=r"lacks input_ids or labels(?s:.)*chosen"):
        DocumentRows(pairs, RowRules(7))
