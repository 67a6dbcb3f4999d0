from __future__ import annotations

from pathlib import Path

import pytest

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
