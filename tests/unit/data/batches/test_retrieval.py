"""Retrieval data in NeMo AutoModel's formats: documents in a corpus or in rows, negatives, instructions, mistakes."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from automodel_ckpt.data.collate import IGNORE_INDEX
from automodel_ckpt.data.retrieval import retrieval
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError
from tests.fixtures.embedding.tiny_pairs import tokenizer_of

TOKENIZER = tokenizer_of("llama")
DOCUMENTS = [{"id": number, "text": text} for number, text in enumerate(("ba", "bo", "ku", "la"))]
ROWS: list[dict[str, Any]] = [
    {
        "question_id": "a",
        "question": "fa",
        "corpus_id": "c",
        "pos_doc": [{"id": 2}],
        "neg_doc": [0],
    },
    {
        "question_id": "b",
        "question": "ra ro ru",
        "corpus_id": "c",
        "pos_doc": ["1", "0"],
        "neg_doc": [{"id": "3"}, "0", "2"],
    },
]
CORPUS = {"class": "TextQADataset", "corpus_id": "c", "query_instruction": "find", "other": 1}
INLINE: list[dict[str, Any]] = [
    {"query": "so", "pos_doc": "su", "neg_doc": ["ta", "to"]},
    {"question": "mo", "pos_doc": ["mu", "ma"], "neg_doc": {"text": "no"}},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def with_corpus(directory: Path, rows: list[dict[str, Any]], **metadata: Any) -> str:
    """Write a JSON file with *rows* and its corpus."""
    (directory / "corpus").mkdir()
    lines(directory / "corpus" / "train.jsonl", DOCUMENTS)
    lines(directory / "corpus" / "test.jsonl", [{"id": 0, "text": "another"}])
    (directory / "corpus" / "merlin_metadata.json").write_text(json.dumps(CORPUS | metadata))
    path = directory / "train.json"
    path.write_text(json.dumps({"corpus": {"path": "./corpus"}, "data": rows}))
    return str(path)


def texts_of(dataset: Any) -> list[list[str]]:
    """The texts of each sample, without special tokens."""
    found = []
    for sample in (dataset[index] for index in range(len(dataset))):
        texts: list[list[int]] = []
        for token, label in zip(sample["input_ids"], sample["labels"], strict=True):
            if label == IGNORE_INDEX:
                texts.append([])
            else:
                texts[-1].append(token)
        found.append([TOKENIZER.decode(text) for text in texts])
    return found


def test_documents_are_found_in_the_corpus_and_negatives_are_repeated(tmp_path: Path) -> None:
    path = with_corpus(tmp_path, ROWS)
    expected = [["fa", "ku", "ba", "ba"], ["ra ro ru", "bo", "la", "ba"]]
    assert texts_of(retrieval(TOKENIZER, [path], num_negatives=2)) == expected
    found = retrieval(TOKENIZER, [path], num_negatives=1, instructions=True, document_prompt="do ")
    assert texts_of(found) == [["find fa", "do ku", "do ba"], ["find ra ro ru", "do bo", "do la"]]
    short = retrieval(TOKENIZER, [path], num_negatives=0, query_length=2)
    assert texts_of(short) == [["fa", "ku"], ["ra", "bo"]]
    assert len(retrieval(TOKENIZER, [path], max_samples=1)) == 1


def test_a_changed_corpus_makes_other_samples(tmp_path: Path) -> None:
    path = with_corpus(tmp_path, ROWS)
    before = retrieval(TOKENIZER, [path])
    lines(tmp_path / "corpus" / "train.jsonl", [each | {"text": "sa"} for each in DOCUMENTS])
    after = retrieval(TOKENIZER, [path])
    assert texts_of(after)[0] == ["fa"] + ["sa"] * 5
    assert before.identity != after.identity


def test_sources_are_concatenated_and_parts_of_them_drawn_as_in_automodel(tmp_path: Path) -> None:
    many = lines(
        tmp_path / "many.jsonl", [INLINE[0] | {"query": word} for word in ["ba", "bo", "ku", "la"]]
    )
    inline = str(lines(tmp_path / "rows.jsonl", INLINE))
    sources = [{"path": str(many), "num_samples": 2}, inline, with_corpus(tmp_path, ROWS)]
    found = texts_of(retrieval(TOKENIZER, sources, num_negatives=1, seed=5))
    drawn = random.Random(5).sample(["ba", "bo", "ku", "la"], 2)
    assert [texts[0] for texts in found] == [*drawn, "so", "mo", "fa", "ra ro ru"]
    assert found[2:4] == [["so", "su", "ta"], ["mo", "mu", "no"]]


def test_a_subset_of_the_hub_has_a_second_one_with_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "set": lines(tmp_path / "queries.jsonl", ROWS),
        "set_corpus": lines(tmp_path / "documents.jsonl", DOCUMENTS),
    }
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps({"corpus_id": "set", "passage_instruction": "find"}))

    def of(repo: str, subset: str) -> Source:
        assert repo == "org/name"
        return Source(str(files[subset]))

    def downloaded(repo: str, name: str, repo_type: str) -> str:
        assert (repo, name, repo_type) == ("org/name", "set/dataset_metadata.json", "dataset")
        return str(metadata)

    monkeypatch.setattr(Source, "of", of)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", downloaded)
    found = retrieval(TOKENIZER, ["hf://org/name/set"], num_negatives=1, instructions=True)
    assert texts_of(found)[0] == ["fa", "find ku", "find ba"]


@pytest.mark.parametrize(
    ("change", "metadata", "what"),
    [
        ({"neg_doc": []}, {}, "a query has no neg_doc"),
        ({"pos_doc": []}, {}, "a query has no pos_doc"),
        ({"pos_doc": [9]}, {}, "has no document with this id"),
        ({"corpus_id": "d"}, {}, "the corpus of a row is unknown"),
        ({"question": None}, {}, "field query of a sample is missing"),
        ({}, {"class": "ColPaliDataset"}, "its class is ColPaliDataset"),
    ],
)
def test_mistakes_in_data_are_located(
    tmp_path: Path, change: Mapping[str, Any], metadata: dict[str, Any], what: str
) -> None:
    path = with_corpus(tmp_path, [ROWS[0], {**ROWS[1], **change}], **metadata)
    with pytest.raises(RecipeError, match=what) as caught:
        retrieval(TOKENIZER, [path])
    if change:
        assert caught.value.problems[0].where == f"{path}, row 1 of data"


@pytest.mark.parametrize(
    ("sources", "what"),
    [
        ([], "sources is out of range"),
        ([{"name": "a"}], "this is no source of retrieval data"),
        ([{"path": "a.jsonl", "num_samples": 0}], "this is no source of retrieval data"),
        (["a.txt"], "this is no source of retrieval data"),
        (["hf://org/name"], "this is no source of retrieval data"),
        (["missing.json"], "retrieval data cannot be read"),
        (["list.json"], "a list instead of a mapping"),
        (["other.json"], "it has no list corpus"),
        (["empty.json"], r"retrieval data cannot be read[\s\S]*merlin_metadata.json"),
    ],
)
def test_wrong_sources_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[Any], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    Path("other.json").write_text("{}")
    Path("empty.json").write_text(json.dumps({"corpus": [{"path": "none"}], "data": []}))
    with pytest.raises(RecipeError, match=what):
        retrieval(TOKENIZER, sources)
