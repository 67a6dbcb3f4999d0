from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from automodel_ckpt.data.encode import Truncation
from automodel_ckpt.data.rowstream import row_stream
from automodel_ckpt.data.source import Source
from automodel_ckpt.errors import RecipeError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Laid out as data sets of the Hub are, with two splits."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (data / "test.jsonl").write_text('{"text": "three"}\n')
    return data


def test_a_directory_has_splits_as_on_the_hub(directory: Path) -> None:
    train, test = Source(str(directory)), Source(str(directory), split="test")
    assert train.texts(["text"]) == [["one", "two"]]
    assert test.texts(["text"]) == [["three"]]
    assert train.fingerprint() != test.fingerprint()
    assert train.fingerprint() == Source(str(directory)).fingerprint()
    assert test.place(0) == f"{directory} test, row 0"


def test_a_part_of_a_file_is_a_split_of_it(directory: Path) -> None:
    path = str(directory / "train.jsonl")
    half = Source(path, split="train[50%:]")
    assert half.texts(["text"]) == [["two"]]
    assert half.fingerprint() != Source(path).fingerprint()
    assert half.place(0) == f"{path} train[50%:], row 0"


def test_the_working_directory_is_a_directory_like_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    assert Source(".", split="test").texts(["text"]) == [["three"]]


def test_a_line_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"text": "one"}\n{"text": "caf\xe9"}\n'.encode("latin-1"))
    with pytest.raises(RecipeError, match=rf"a line is not UTF-8 text\n  where:  {path}:2"):
        Source(str(path)).texts(["text"])


@pytest.mark.parametrize(
    ("name", "split", "what"), [(None, "dev", 'Unknown split "dev"'), ("easy", "train", "easy.*not found")]
)
def test_an_unknown_split_or_subset_is_refused(directory: Path, name: str | None, split: str, what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        Source(str(directory), name, split).fingerprint()


def test_a_file_has_neither_subsets_nor_other_splits(directory: Path) -> None:
    path = str(directory / "train.jsonl")
    with pytest.raises(RecipeError, match="a data file has no subsets"):
        Source(path, name="easy").fingerprint()
    with pytest.raises(RecipeError, match='Unknown split "dev"'):
        Source(path, split="dev").texts(["text"])


def test_a_name_that_the_hub_does_not_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=r"nobody/nothing, None, train \([\s\S]*needs the network"):
        Source("nobody/nothing").fingerprint()


def test_a_compressed_file_is_read_like_the_plain_one(tmp_path: Path) -> None:
    path = tmp_path / "data.JSONL.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n\n{"text": "two"}\n'))
    assert Source(str(path)).values("text") == ["one", "two"]
    assert next(iter(Source(str(path)).stream()))["text"] == "one"
    assert Source(str(path)).place(1) == f"{path}:3"


def test_a_csv_holds_texts_and_an_empty_place_is_none(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text('\ufeffquestion,answer,empty\n1 + 2,3,\nNamibia,NA,\n"a\nb",1e5,\n')
    source = Source(str(path))
    assert source.texts(["question", "answer"]) == [["1 + 2", "Namibia", "a\nb"], ["3", "NA", "1e5"]]
    assert source.values("empty") == [None, None, None]
    path.write_text("a,a\n1,2\n")
    assert Source(str(path)).fields == ["a", "a.1"]


def test_a_table_without_rows_is_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(RecipeError, match="the data file is empty"):
        Source(str(path)).stream()
    with pytest.raises(RecipeError, match="the data file is empty"):
        Source(str(path)).texts(["text"])


LINES = b'{"text": "a"}\n' * 40


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": \n', "Expecting value: line 1 column 9"),
        (b"[1]\n", r"no object with fields, but \[1\]"),
        (b'{"text": "a", "text": "b"}\n', "a field stands there twice, among text, text"),
        (b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
        (b'{"text": ' + b"[" * 3000 + b"\n", ".*recursion"),
    ],
)
@pytest.mark.parametrize("place", ["a file", "a stream", "a directory"])
def test_the_one_line_that_is_no_json_is_named(directory: Path, line: bytes, fault: str, place: str) -> None:
    path = directory / "train.jsonl"
    path.write_bytes(LINES + line + LINES)
    source = Source(str(directory if place == "a directory" else path))

    def read() -> None:
        if place == "a stream":
            list(row_stream(source, lambda rows: [], Truncation("error", 8), block=10, max_samples=None))
        source.texts(["text"])

    with pytest.raises(RecipeError, match=rf"a line is not JSON\n  where:  {path}:41\n  value:  {fault}"):
        read()


@pytest.mark.parametrize(
    ("path", "remedy"), [("s3://bucket/a.jsonl", "copy the file here"), ("data/*.jsonl", "patterns are not followed")]
)
def test_what_is_no_path_of_a_file_is_refused_with_what_to_do(path: str, remedy: str) -> None:
    with pytest.raises(RecipeError, match=remedy):
        Source(path).fingerprint()
