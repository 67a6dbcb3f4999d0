from __future__ import annotations

from typing import Any

import pytest
import torch

from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.errors import RecipeError

SHORT = {"input_ids": [1, 2], "labels": [-100, 2]}
LONG = {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}


def test_samples_are_padded_on_the_right_to_the_longest() -> None:
    batch = PadCollator(pad_token_id=9)([SHORT, LONG])
    assert batch["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 2, -100], [3, 4, 5]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize(("multiple", "width"), [(1, 3), (2, 4), (3, 3), (8, 8)])
def test_the_length_is_rounded_up_to_the_multiple(multiple: int, width: int) -> None:
    assert PadCollator(0, pad_to_multiple_of=multiple)([LONG])["labels"].shape == (1, width)


@pytest.mark.parametrize(
    "sample",
    [
        {"input_ids": [1]},
        {"input_ids": [1, 2], "labels": [1]},
        {"input_ids": [], "labels": []},
        "text",
    ],
)
def test_a_sample_of_another_shape_is_refused(sample: Any) -> None:
    with pytest.raises(RecipeError, match="labels"):
        PadCollator(0)([LONG, sample])


def test_a_multiple_of_zero_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least 1"):
        PadCollator(0, pad_to_multiple_of=0)


def test_a_sample_that_is_already_padded_is_rejected() -> None:
    padded = {"input_ids": [1, 2, 0], "labels": [1, 2, -100], "attention_mask": [1, 1, 0]}
    with pytest.raises(RecipeError, match=r"already padded[\s\S]*1 of 3 tokens"):
        PadCollator(9)([padded])
