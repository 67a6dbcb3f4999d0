"""Labels in data: names, indices, lists and numbers, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.samples.labels import Labels
from automodel_ckpt.errors import RecipeError

TOPICS = Labels(("sport", "news", "2024"), "single_label")
PAIR = Labels(("no", "yes"), "single_label")
SEVERAL = Labels(("a", "b", "c"), "multi_label")
ONE_NUMBER = Labels(("LABEL_0",), "regression")
TWO_NUMBERS = Labels(("x", "y"), "regression")


@pytest.mark.parametrize(
    ("labels", "value", "targets"),
    [
        (PAIR, "yes", [1]),
        (PAIR, 1, [1]),
        (PAIR, 0.0, [0]),
        (PAIR, "1", [1]),
        (PAIR, True, [1]),
        # A name takes precedence over an index.
        (TOPICS, 2024, [2]),
        (SEVERAL, [], [0, 0, 0]),
        (SEVERAL, ["c", 0], [1, 0, 1]),
        (ONE_NUMBER, "-1.5", [-1.5]),
        (ONE_NUMBER, -100, [-100]),
        (TWO_NUMBERS, [1, 2.5], [1, 2.5]),
    ],
)
def test_a_label_is_a_name_or_an_index_or_a_number(
    labels: Labels, value: Any, targets: list[float]
) -> None:
    assert labels.targets(value) == targets


@pytest.mark.parametrize(
    ("labels", "value", "hint"),
    [
        (PAIR, "yess", "did you mean yes"),
        (PAIR, 2, "from 0 to 1"),
        (PAIR, -1, "from 0 to 1"),
        (PAIR, 0.5, "the labels are no, yes"),
        (PAIR, None, "the labels are no, yes"),
        # Is it the index or the name of a year that is missing?
        (TOPICS, 1, "the labels are sport, news, 2024"),
        (SEVERAL, "a", "a list of names"),
        (SEVERAL, ["a", "d"], "the labels are a, b, c"),
        (ONE_NUMBER, "high", "give a number"),
        (ONE_NUMBER, float("nan"), "give a number"),
        (TWO_NUMBERS, 3, "a list of 2 numbers"),
    ],
)
def test_another_value_is_rejected(labels: Labels, value: Any, hint: str) -> None:
    with pytest.raises(UnusableSample) as caught:
        labels.targets(value)
    assert hint in caught.value.hint


def test_a_checkpoint_with_other_labels_is_rejected() -> None:
    PAIR.load_state_dict(PAIR.state_dict())
    with pytest.raises(RecipeError, match="other labels"):
        PAIR.load_state_dict(Labels(("yes", "no"), "single_label").state_dict())
