"""Rows are what their lines say: whatever other rows contain, compressed or not, in memory or as a stream."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.rows.row_files import RecordStream
from automodel_ckpt.data.rows.rows import RecordRows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError

ROWS: list[dict[str, Any]] = [
    {"date": "2024-01-01", "number": 1, "mixed": "text"},
    {"date": "2024-01-01T10:00:00Z", "number": 2.5, "mixed": {"a": None, "b": [1, "x"]}},
    {"number": 2**70 + 1, "mixed": None},
    {"date": "007", "number": -(2**63) - 1, "mixed": [True, 1, 1.0]},
    {"date": "é 😀 \u2028", "number": 9007199254740993, "extra": {}},
]


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FILES = {
    "a.jsonl": as_lines(ROWS),
    "a.jsonl.gz": gzip.compress(as_lines(ROWS)),
    "lines.json": as_lines(ROWS),
    "list.json": json.dumps(ROWS).encode(),
    "indented.json": json.dumps(ROWS, indent=1, ensure_ascii=False).encode(),
}


def exactly(rows: Any) -> list[str]:
    """Text that tells 1 from 1.0 and from True, and null from a missing key."""
    return [repr(row) for row in rows]


def in_memory(source: Source) -> list[dict[str, Any]]:
    columns = dict(zip(source.fields, source.columns(source.fields), strict=True))
    return [
        {name: values[row] for name, values in columns.items()} for row in range(source.num_rows)
    ]


def streamed(source: Source) -> list[dict[str, Any]]:
    return [content for content, _ in source.stream()]


@pytest.mark.parametrize("name", FILES)
def test_a_json_row_is_what_its_line_says_regardless_of_other_rows(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    everywhere = ["date", "number", "mixed", "extra"]
    filled = [{field: row.get(field) for field in everywhere} for row in ROWS]
    assert exactly(in_memory(Source(str(path)))) == exactly(filled)
    assert exactly(Source(str(path)).row(number) for number in range(5)) == exactly(filled)
    assert exactly(streamed(Source(str(path)))) == exactly(ROWS), "a missing key is not null"


def test_a_directory_of_json_is_read_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(as_lines(ROWS[:3]))
    (tmp_path / "test.jsonl").write_bytes(as_lines(ROWS[3:]))
    source = Source(str(tmp_path), split="train[1:]+test")
    assert source.values("number") == [row["number"] for row in ROWS[1:]]
    assert [source.place(row) for row in (1, 2)] == [
        f"{tmp_path}/train.jsonl:3",
        f"{tmp_path}/test.jsonl:1",
    ]
    assert exactly(streamed(Source(str(tmp_path), split="test"))) == exactly(ROWS[3:])


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('[{"a": 1},\n {"a": 2}\n {"a": 3}]', 3, "Expecting ',' delimiter"),
        ('[{"a": 1}]\n[{"a": 2}]', 2, "Extra data"),
        ('[{"a": 1},\n {"a": 2, "a": 3}]', 2, "duplicate field"),
        ('{"a": 1} {"a": 2}', 1, "Extra data"),
        ('"text"', 1, "neither a list nor an object per line"),
        ('[{"a": 1},\n {"a" 2}]', 2, "Expecting ':'"),
        ('[{"a": 1},\n [2]]', 2, "not an object with fields"),
    ],
)
def test_the_line_of_a_json_file_that_is_wrong_is_named(
    tmp_path: Path, content: str, line: int, reason: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(
        RecipeError, match=rf"not JSON\n  where:  {path}:{line}\n  value:  .*{reason}"
    ):
        RecordRows("data", [path])


def test_a_tsv_has_no_quoting_and_a_csv_has_that_of_rfc_4180(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('a\tb\n"one\t1.0\ntwo"\t007\nsay ""x""\t2024-01-01\r\n')
    (tmp_path / "a.csv").write_text(
        'a,b\r\n"one\r\n\r\n""x"", ",1.0\r\n\r\ntwo"s,007\r\n' + "z" * 200_000 + ",\n"
    )
    tabs, commas = Source(str(tmp_path / "a.tsv")), Source(str(tmp_path / "a.csv"))
    assert tabs.columns(["a", "b"]) == [['"one', 'two"', 'say ""x""'], ["1.0", "007", "2024-01-01"]]
    assert commas.columns(["a", "b"]) == [
        ['one\r\n\r\n"x", ', 'two"s', "z" * 200_000],
        ["1.0", "007", None],
    ]
    assert streamed(tabs) == in_memory(tabs) and streamed(commas) == in_memory(commas)
    assert [commas.place(row) for row in range(3)] == [
        f"{tmp_path}/a.csv:{line}" for line in (2, 6, 7)
    ]


@pytest.mark.parametrize(
    ("name", "second", "what", "value"),
    [
        ("b.csv", "q,a\n1,2\n3,4,5\n", "b.csv:3", "5 values|3 values for q, a"),
        ("b.csv", "q,a\n1,2\n3\n", "b.csv:3", "1 values for q, a"),
        ("b.csv", "q,answer\n1,2\n", "b.csv:1", "q, answer; .*a.csv has q, a"),
        ("b.csv", 'q,a\n1,2\n"3,4\n5,6\n', "b.csv:3", "unexpected end of data"),
        ("b.tsv", "q\ta\n1\t2\n3\t4\t5\n", "b.tsv:3", "3 values for q, a"),
    ],
)
def test_each_of_several_tables_is_validated_before_training(
    tmp_path: Path, name: str, second: str, what: str, value: str
) -> None:
    first = tmp_path / f"a{name[1:]}"
    first.write_text("q\ta\nx\ty\n" if name == "b.tsv" else "q,a\nx,y\n")
    (tmp_path / name).write_text(second)
    source = Source.of([str(first), str(tmp_path / name)])
    for read in (lambda: source.columns(["q", "a"]), source.stream):
        with pytest.raises(RecipeError, match=rf"{what}\n  value:  ({value})"):
            read()


def test_the_byte_that_is_not_utf_8_is_named_with_its_place_in_the_line(tmp_path: Path) -> None:
    for name, content in (("a.json", '[\n {"a":\n  "é"}]'), ("a.csv", 'a\n"b\n  é"\n')):
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        offset = 3 if name == "a.json" else 2
        with pytest.raises(
            RecipeError, match=rf"where:  {tmp_path}/{name}:3\n  value:  byte 0xe9 at {offset} of"
        ):
            RecordRows("data", [tmp_path / name])


def test_tables_with_the_same_columns_in_another_order_are_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a\n1,2\n")
    (tmp_path / "b.csv").write_text("a,q\n4,3\n")
    assert Source.of(f"{tmp_path}/*.csv").columns(["q", "a"]) == [["1", "3"], ["2", "4"]]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json", "a.jsonl"])
def test_a_file_without_rows_is_empty_and_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(
        {".csv": "text,b\n", ".tsv": "text\n\n", ".json": "[ ]", ".jsonl": "\n"}[path.suffix]
    )
    for read in (lambda: Source(str(path)).columns(["text"]), lambda: Source(str(path)).stream()):
        with pytest.raises(RecipeError, match=rf"the data file is empty\n  where:  {path}"):
            read()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_a_stream_continues_after_any_row(tmp_path: Path, name: str) -> None:
    contents = {
        "a.jsonl": as_lines(ROWS[:2]) + b"\n" + as_lines(ROWS[2:]),
        "a.jsonl.gz": FILES["a.jsonl.gz"],
        "a.json": FILES["indented.json"],
        "a.csv": b'\xef\xbb\xbftext,b\n"a\nb",c\n\nd,e\n',
        "a.tsv": b"text\tb\n\na\tb\nc\td\n",
        "a.txt": b"one\n\nthree",
    }
    files = [tmp_path / name, tmp_path / f"b{name[1:]}"]
    for file in files:
        file.write_bytes(contents[name])
    whole = list(RecordStream(files))
    assert len(whole) in (4, 6, 10) and {place.split(":")[0] for _, place in whole} == set(
        map(str, files)
    )
    if name == "a.json":
        changed = RecordStream(files)
        changed.load_state_dict(changed.state_dict() | {"offset": 100, "num_lines": 9})
        files[0].write_bytes(b'[{"a": 1}]')
        with pytest.raises(RecipeError, match=rf"not JSON\n  where:  {files[0]}:10"):
            list(changed)
        files[0].write_bytes(contents[name])
    for num_rows in range(len(whole) + 1):
        first, second = RecordStream(files), RecordStream(files)
        begun = first.take(num_rows)
        before = list(begun)
        second.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert before + list(second) == whole
