"""Pairs of texts: their fields, prompts and negatives, truncation, and the rows that the collator makes of them."""

from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.collate import IGNORE_INDEX
from automodel_ckpt.data.text_pairs import PairCollator, text_pairs
from automodel_ckpt.errors import RecipeError
from tests.fixtures.embedding.tiny_pairs import tokenizer_of
from tests.unit.data.toys import jsonl

TOKENIZER = tokenizer_of("bert")
ROWS: list[dict[str, Any]] = [
    {"query": "ba bo", "positive": "ku", "negatives": ["la", "lo"], "negative_1": "ra"},
    {"query": "fa", "positive": "ku sa su", "negatives": None, "negative_1": None},
]


def texts_of(sample: dict[str, list[int]]) -> list[str]:
    """The texts of a sample, with special tokens."""
    texts: list[list[int]] = []
    for token, label in zip(sample["input_ids"], sample["labels"], strict=True):
        if label == IGNORE_INDEX:
            texts.append([])
        texts[-1].append(token)
    return [TOKENIZER.decode(text) for text in texts]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return jsonl(tmp_path / "rows.jsonl", *ROWS)


def test_a_sample_has_query_document_and_negatives_with_prompts(data: str) -> None:
    dataset: Any = text_pairs(TOKENIZER, data, query_prompt="find ", document_prompt="do ")
    assert texts_of(dataset[0]) == [
        "[CLS] find ba bo [SEP]",
        "[CLS] do ku [SEP]",
        "[CLS] do la [SEP]",
        "[CLS] do lo [SEP]",
        "[CLS] do ra [SEP]",
    ]
    assert len(texts_of(dataset[1])) == 2
    dataset = text_pairs(TOKENIZER, data, max_negatives=1, query_field="{{ query }} {{ positive }}")
    assert texts_of(dataset[0]) == ["[CLS] ba bo ku [SEP]", "[CLS] ku [SEP]", "[CLS] la [SEP]"]
    dataset = text_pairs(TOKENIZER, data, negative_fields=["query"])
    assert texts_of(dataset[1])[2:] == ["[CLS] fa [SEP]"]


def test_texts_of_one_token_each_are_a_sample(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bert")
    tokenizer.backend_tokenizer.post_processor = None
    data = jsonl(tmp_path / "rows.jsonl", {"query": "ba", "positive": "ku"})
    (sample,) = text_pairs(tokenizer, data)
    assert [TOKENIZER.decode(token) for token in sample["input_ids"]] == ["ba", "ku"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_text_is_truncated_with_its_special_tokens(
    data: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(TOKENIZER, "truncation_side", side)
    dataset: Any = text_pairs(TOKENIZER, data, seq_length=4)
    assert texts_of(dataset[1])[1] == "[CLS] ku sa [SEP]"
    assert TOKENIZER.truncation_side == side, "exports contain it"
    assert "1 of 2 samples truncated" in caplog.text
    # A truncated text leaves no trace in the tokenizer, whose digest is part of the state of a run.
    before = text_pairs(TOKENIZER, data).identity
    again: Any = text_pairs(TOKENIZER, data, seq_length=4)
    assert again.identity == dataset.identity
    assert text_pairs(TOKENIZER, data).identity == before
    with pytest.raises(RecipeError, match="a text of a pair is longer than seq_length") as caught:
        text_pairs(TOKENIZER, data, seq_length=4, truncation="error")
    (problem,) = caught.value.problems
    assert problem.where == f"{data}:2 (5 tokens)"


@pytest.mark.parametrize(
    ("change", "options", "what"),
    [
        ({"positive": " "}, {}, "a text of a pair is empty"),
        ({"negatives": ["la", ""]}, {}, "a text of a pair is empty"),
        ({"negatives": [3]}, {}, "field negatives of a sample is not text"),
        ({"query": None}, {}, "field query of a sample is missing"),
        ({}, {"negative_fields": ["other"]}, "the data has no field other"),
        ({}, {"max_negatives": -1}, "is out of range"),
        ({}, {"truncation": "skip"}, "unknown value for truncation"),
        ({}, {"seq_length": 1}, "is out of range"),
    ],
)
def test_bad_rows_and_arguments_are_rejected(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], what: str
) -> None:
    path = jsonl(tmp_path / "bad.jsonl", ROWS[0], ROWS[0] | change)
    with pytest.raises(RecipeError, match=what) as caught:
        text_pairs(TOKENIZER, path, **options)
    if change:
        assert caught.value.problems[0].where == f"{path}:2"


def test_rows_are_pairs_then_negatives(data: str) -> None:
    dataset: Any = text_pairs(TOKENIZER, data)
    batch = PairCollator(0, 4)([dataset[0], dataset[1]])
    rows = [TOKENIZER.decode(row[row != 0]) for row in batch["input_ids"]]
    inner = [row.removeprefix("[CLS] ").removesuffix(" [SEP]") for row in rows]
    assert inner == ["ba bo", "ku", "fa", "ku sa su", "la", "lo", "ra"]
    assert batch["input_ids"].shape == (7, 8)
    assert batch["num_negatives"].tolist() == [3, 0]
    assert (batch["labels"] == batch["input_ids"]).equal(batch["attention_mask"].bool())
    twice = PairCollator(0)([dataset[0], dataset[0]])
    assert twice["digests"][:2].equal(twice["digests"][2:4])
    assert len(set(batch["digests"].tolist())) == 7
    with pytest.raises(RecipeError, match="a sample is no pair of texts"):
        PairCollator(0)([{"input_ids": [1, 2], "labels": [1, 2]}])
