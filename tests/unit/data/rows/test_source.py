import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pyarrow  # type: ignore[import-untyped]
import pytest

from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.samples import RowStream
from automodel_ckpt.data.samples.tokenized import Truncation
from automodel_ckpt.errors import RecipeError


def texts_of(stream: Any) -> list[str]:
    return [content["text"] for content, _ in stream]


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
    assert test.place(0) == f"{directory}/test.jsonl:1"


def test_a_part_of_a_file_is_a_split_of_it(directory: Path) -> None:
    path = str(directory / "train.jsonl")
    half = Source(path, split="train[50%:]")
    assert half.texts(["text"]) == [["two"]]
    # In this form, checkpoints of earlier versions have it.
    assert half.fingerprint() == Source(path).fingerprint() + "[50%:]"
    assert half.place(0) == f"{path}:2"


@pytest.mark.parametrize(
    ("name", "split", "what"),
    [(None, "dev", 'Unknown split "dev"'), ("easy", "train", "easy.*not found")],
)
def test_an_unknown_split_or_subset_is_refused(
    directory: Path, name: str | None, split: str, what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        Source(str(directory), name, split).fingerprint()


def test_a_file_has_neither_subsets_nor_other_splits(directory: Path) -> None:
    path = str(directory / "train.jsonl")
    with pytest.raises(RecipeError, match="no subsets"):
        Source(path, name="easy").fingerprint()
    with pytest.raises(RecipeError, match="a data file has only the split train"):
        Source(path, split="train[:1]+dev[:1]").texts(["text"])
    with pytest.raises(RecipeError, match="a data file cannot be read"):
        Source(str(directory / "misspelled" / "directory"), split="validation").texts(["text"])
    for name in ("misspelled.jsonl", f"{'x' * 300}.jsonl"):
        with pytest.raises(RecipeError, match="a data file cannot be read"):
            Source(str(directory / name), split="validation").texts(["text"])
    # Opening it would wait for a writer forever.
    os.mkfifo(directory / "pipe.jsonl")
    with pytest.raises(RecipeError, match="not a regular file"):
        Source(str(directory / "pipe.jsonl")).fingerprint()


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.JSONL.gz", gzip.compress),
        ("a.jsonl.bz2", bz2.compress),
        ("a.ndjson.xz", lzma.compress),
        ("a.jsonl.zst", partial(pyarrow.compress, codec="zstd", asbytes=True)),
    ],
)
def test_a_compressed_file_is_read_like_the_plain_one_and_a_damaged_one_is_named(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / name
    path.write_bytes(compress(b'{"text": "one"}\n\n{"text": "two"}\n'))
    assert Source(str(path)).values("text") == ["one", "two"]
    assert texts_of(Source(str(path)).stream()) == ["one", "two"]
    assert Source(str(path)).place(1) == f"{path}:3"
    path.write_bytes(compress(LINES * 100)[:-9])
    for read in (
        lambda: list(Source(str(path)).texts(["text"])),
        lambda: first_samples(Source(str(path))),
    ):
        with pytest.raises(RecipeError, match=f"a compressed file is damaged\n  where:  {path}\n"):
            read()
    uncompressed_name = tmp_path / "a.jsonl"
    uncompressed_name.write_bytes(compress(LINES))
    with pytest.raises(RecipeError, match="the name of a compressed file ends in"):
        Source(str(uncompressed_name)).texts(["text"])


def test_a_zstd_file_of_several_frames_is_continued_at_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    lines = [b'{"text": "line %d"}\n' % number for number in range(100_000)]
    # Concatenated files have several frames.
    frames = [pyarrow.compress(b"".join(part), "zstd", True) for part in (lines[:7], lines[7:])]
    path.write_bytes(b"".join(frames))
    stream = Source(str(path)).stream()
    first = stream.take(60_000)
    assert texts_of(first) == [f"line {number}" for number in range(60_000)]
    stream.load_state_dict(first.state_dict())
    assert texts_of(stream)[0] == "line 60000"


def first_samples(source: Source) -> None:
    list(RowStream(source, lambda rows: [], Truncation("error", 8), block=10, max_samples=None))


LINES = b'{"text": "a"}\n' * 40


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("s3://bucket/*.jsonl", "only local files and data sets of the Hub"),
        ("none/*.jsonl", r"no data file matches this pattern[\s\S]*working directory"),
        ([], "the path is empty"),
        ("", "the path is empty"),
        ("/no/such/directory", "ENOENT"),
        (["train.jsonl", "no.jsonl"], r"cannot be read[\s\S]*no.jsonl"),
        (["*.jsonl", "train.jsonl"], r"listed twice[\s\S]*train.jsonl"),
        (["train.jsonl", "a.csv"], r"different formats[\s\S]*\*.csv, \*.jsonl"),
        (["train.jsonl", "sub"], "unknown data file format"),
    ],
)
def test_what_are_no_files_to_read_is_refused_with_what_to_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch, path: str | list[str], said: str
) -> None:
    monkeypatch.chdir(directory)
    (directory / "a.csv").write_text("text\na\n")
    (directory / "sub").mkdir()
    with pytest.raises(RecipeError, match=said):
        Source.of(path).fingerprint()


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Five parts of a data set, one of them empty, and a file whose name looks like a pattern."""
    for number, lines in enumerate(
        ('{"text": "b"}\n\n{"text": "c"}\n', '{"text": "d"}\n', "", '{"text": "e"}\n')
    ):
        (tmp_path / f"part-{number + 1}.jsonl").write_text(lines)
    (tmp_path / "part-[0].jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def test_the_files_of_a_list_or_a_pattern_are_read_in_order(parts: Path) -> None:
    some = Source.of(f"{parts}/part-[1-4].jsonl")
    assert some.values("text") == texts_of(some.stream()) == ["b", "c", "d", "e"]
    assert [some.place(row) for row in (1, 2, 3)] == [
        f"{parts}/part-{at}" for at in ("1.jsonl:3", "2.jsonl:1", "4.jsonl:1")
    ]
    assert Source.of(f"{parts}/part-[0].jsonl").values("text") == ["a"], (
        "a file of this name is that file"
    )
    listed = Source.of([f"{parts}/part-4.jsonl", f"{parts}/part-[0].jsonl", f"{parts}/*-1.jsonl"])
    assert listed.values("text") == ["e", "a", "b", "c"]
    assert listed.path == f"{parts}/part-4.jsonl and 2 more"
    every = Source.of(f"{parts}/**/*.jsonl")
    assert every.values("text") == ["b", "c", "d", "e", "a"]
    assert len({source.fingerprint() for source in (some, listed, every)}) == 3


def test_a_directory_of_tables_is_read_as_one_of_them(directory: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (directory / name).unlink()
    with pytest.raises(
        RecipeError, match=r"the data set cannot be read[\s\S]*any data files[\s\S]*\*\.tsv"
    ):
        Source(str(directory)).texts(["text"])
    (directory / "train.tsv").write_text("question\tanswer\nNamibia\tNA\n1\t2\n")
    assert Source(str(directory)).texts(["question", "answer"]) == [["Namibia", "1"], ["NA", "2"]]


# datasets 4.5 leaves the file that it read to the garbage collector.
@pytest.mark.filterwarnings(
    "ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_options_for_reading_in_a_directorys_readme_are_followed(directory: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (directory / name).unlink()
    (directory / "train.csv").write_text("question;answer\na b;c\n")
    assert Source(str(directory)).fields == ["question;answer"]
    options = '- config_name: default\n  data_files: "*.csv"\n  sep: ";"\n'
    (directory / "README.md").write_text(f"---\nconfigs:\n{options}---\n")
    assert Source(str(directory)).texts(["question", "answer"]) == [["a b"], ["c"]]


def test_what_save_to_disk_wrote_is_read_in_its_order(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": text} for text in "abc"])
    rows.select([2, 0]).save_to_disk(tmp_path / "kept", num_shards=2)
    rows.select([]).save_to_disk(tmp_path / "none")
    assert Source(str(tmp_path / "kept")).texts(["text"]) == [["c", "a"]]
    assert texts_of(Source(str(tmp_path / "kept")).stream()) == ["c", "a"]
    with pytest.raises(RecipeError, match="the data file is empty"):
        Source(str(tmp_path / "none")).texts(["text"])


def test_files_that_a_directory_of_another_kind_leaves_out_are_named(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "inner").mkdir()
    for name in ("more.csv", "inner/more.csv"):
        (directory / name).write_text("text\nfour\n")
    assert Source(str(directory)).texts(["text"]) == [["one", "two"]]
    assert "ignoring files of other formats: inner/more.csv, more.csv" in caplog.text


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"one\r\n" + mark + b"two\r\n")
    source = Source(str(tmp_path / "a.txt"))
    assert source.values("text") == texts_of(source.stream()) == ["one", "\ufefftwo"], (
        "it is one only at the beginning"
    )
    (tmp_path / "a.jsonl").write_bytes((mark + b'{"text": "one"}\n') * 2)
    assert Source(str(tmp_path / "a.jsonl")).values("text") == ["one", "one"], (
        "of two files that were joined"
    )


def test_a_damaged_parquet_file_in_a_directory_is_reported_with_the_reason(directory: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (directory / name).unlink()
    (directory / "train.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(
        RecipeError, match=r"the data set cannot be read[\s\S]*Parquet magic bytes not found"
    ):
        Source(str(directory)).texts(["text"])


@pytest.mark.parametrize(
    "split", ["train[:2]+test[1:]", "train[:2]+test[-2:]", "train[:50%]+test[33%:]"]
)
def test_parts_of_splits_are_the_rows_between_their_bounds(tmp_path: Path, split: str) -> None:
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in "abcd")
    )
    (tmp_path / "test.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in "xyz")
    )
    assert Source(str(tmp_path), split=split).texts(["text"]) == [["a", "b", "y", "z"]]


def test_the_fingerprint_of_a_directory_follows_its_content_whatever_reads_it(
    tmp_path: Path,
) -> None:
    rows = datasets.Dataset.from_list([{"text": text} for text in "abc"])
    for name in ("parquet", "jsonl"):
        directory = tmp_path / name
        directory.mkdir()
        write = rows.to_parquet if name == "parquet" else rows.to_json
        write(directory / f"train.{name}")
        first, again = (Source(str(directory)).fingerprint() for _ in range(2))
        (directory / f"train.{name}").unlink()
        write = rows.select([0]).to_parquet if name == "parquet" else rows.select([0]).to_json
        write(directory / f"train.{name}")
        assert first == again != Source(str(directory)).fingerprint()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": \n', "Expecting value: line 1 column 9"),
        (b"[1]\n", r"not an object with fields, but \[1\]"),
        (b'{"text": "a", "text": "b"}\n', "duplicate field, among text, text"),
        (b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
        (b'{"text": ' + b"[" * 100_000 + b"\n", ".*recursion"),
    ],
)
@pytest.mark.parametrize("place", ["a file", "a stream", "a directory"])
def test_the_one_line_that_is_no_json_is_named(
    directory: Path, line: bytes, fault: str, place: str
) -> None:
    path = directory / "train.jsonl"
    path.write_bytes(LINES + line + LINES)
    source = Source(str(directory if place == "a directory" else path))

    def read() -> None:
        if place == "a stream":
            first_samples(source)
        source.texts(["text"])

    with pytest.raises(
        RecipeError, match=rf"a line is not JSON\n  where:  {path}:41\n  value:  {fault}"
    ):
        read()


def test_a_stream_of_a_table_goes_on_where_its_state_says(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": text} for text in "abcd"])
    rows.to_parquet(tmp_path / "train.parquet")
    stream = Source(str(tmp_path)).stream()
    started = iter(stream)
    assert [next(started)[0]["text"] for _ in range(2)] == ["a", "b"]
    resumed = Source(str(tmp_path)).stream()
    resumed.load_state_dict(stream.state_dict())
    assert texts_of(resumed) == ["c", "d"]
