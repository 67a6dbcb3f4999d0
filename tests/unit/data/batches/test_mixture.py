"""Weighted mixtures: exact numbers of samples, an order that depends on seed and epoch only, and exact resumes."""

from collections import Counter
from typing import Any

import pytest

from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.mixture import MixtureDataset, for_each_source, mixture
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.mock import random_tokens
from tests.unit.data.toys import padded_loader as loader

SIZES = {"chat": 30, "code": 8, "math": 50}
WEIGHTS = {"chat": 2.0, "code": 1.0, "math": 1.0}
SOURCE_OF_TOKEN = {1: "chat", 2: "code", 3: "math"}


def sources() -> dict[str, Any]:
    """A source of each size; the last token of a sample is the number of its source."""
    built = {}
    for number, (name, size) in enumerate(SIZES.items(), start=1):
        built[name] = random_tokens(size, 8, 100, first_token=10, end_token=number)
    return built


def ids_of_epochs(loader: GlobalBatchLoader, num_epochs: int) -> list[list[int]]:
    """The sample ids of the next epochs."""
    epochs = []
    for _ in range(num_epochs):
        ids: list[int] = []
        for batch in loader:
            ids += batch.sample_ids
            loader.mark_consumed(batch)
        epochs.append(ids)
    return epochs


def counts_of(dataset: MixtureDataset, ids: list[int]) -> Counter[str]:
    return Counter(SOURCE_OF_TOKEN[dataset[number]["input_ids"][-1]] for number in ids)


def test_an_epoch_has_exactly_the_samples_that_the_weights_ask_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        dataset = mixture(sources(), WEIGHTS)
    # code would be the first to repeat a sample.
    assert len(dataset) == 32
    assert "an epoch of 32 samples has 16 of chat, 0.533 of its 30 samples" in caplog.text
    epochs = ids_of_epochs(loader(dataset), 4)
    for ids in epochs:
        assert counts_of(dataset, ids) == {"chat": 16, "code": 8, "math": 8}
    assert len(set(epochs[0])) == 32
    assert epochs[0] != epochs[1]
    # Every sample of math is used once before any is used again.
    of_math = [number for ids in epochs for number in ids if number >= 38]
    assert len(set(of_math)) == 32
    of_chat = Counter(number for ids in epochs for number in ids if number < 30)
    assert set(of_chat.values()) == {2, 3} and len(of_chat) == 30


def test_a_longer_epoch_repeats_sources_and_no_weights_use_each_once() -> None:
    longer = mixture(sources(), WEIGHTS, num_samples=101)
    (ids,) = ids_of_epochs(loader(longer), 1)
    # 50.5, 25.25 and 25.25: the largest remainder is rounded up.
    assert counts_of(longer, ids) == {"chat": 51, "code": 25, "math": 25}
    assert set(Counter(number for number in ids if 30 <= number < 38).values()) == {3, 4}
    everything = mixture(sources())
    (ids,) = ids_of_epochs(loader(everything), 1)
    assert sorted(ids) == list(range(88))


def test_each_source_is_packed_separately() -> None:
    dataset = for_each_source(mixture(sources(), WEIGHTS), lambda each: PackedDataset(each, 16))
    assert [len(each) for each in dataset.sources.values()] == [15, 4, 25]
    assert dataset.num_of_epoch == {"chat": 8, "code": 4, "math": 4}
    (ids,) = ids_of_epochs(loader(dataset), 1)
    assert all(len(set(dataset[number]["input_ids"][7::8])) == 1 for number in ids)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sources": {}}, "a mixture needs sources"),
        ({"sources": {"a": iter([])}}, "no length and no state"),
        ({"sources": {"a": []}}, "a source of a mixture has no sample"),
        ({"weights": {"chat": 1.0}}, "a positive weight for each source"),
        ({"weights": WEIGHTS | {"code": 0.0}}, "a positive weight for each source"),
        ({"weights": WEIGHTS | {"code": float("inf")}}, "a positive weight for each source"),
        ({"num_samples": 0}, "num_samples is out of range"),
        (
            {"weights": WEIGHTS | {"code": 1e-9}, "num_samples": 10},
            "a source of a mixture has no sample",
        ),
    ],
)
def test_sources_and_weights_that_do_not_fit_are_errors(options: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        mixture(**{"sources": sources(), "weights": WEIGHTS} | options)
