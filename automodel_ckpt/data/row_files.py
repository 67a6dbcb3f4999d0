"""Read the rows of JSON, CSV, TSV and text files without type inference.

A row depends only on its own line: text that looks like a date is text, ``1`` is an integer even if another row has
``2.5``, integers of any size are exact, and a key that only other rows have is missing. Values of CSV and TSV files are
text; an empty value is None.

CSV follows RFC 4180: a value in double quotes may contain commas, line breaks and doubled quotes. TSV has no quoting:
a double quote is an ordinary character, and a value cannot contain a tab or a line break.
"""

from __future__ import annotations

import copy
import csv
import json
import math
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from automodel_ckpt.data.files import damaged, is_damage, kind_of, open_data
from automodel_ckpt.errors import RecipeError

KINDS = frozenset({".jsonl", ".json", ".csv", ".tsv", ".txt"})
"""Suffixes of the files that this module reads."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# The white space of JSON. str.strip() removes characters that are not allowed there.
_BLANK = " \t\n\r"
_FIRST_ROWS = 1000
# The csv module keeps the limit in a C long, which has 32 bits on some platforms.
_LONGEST_CSV_VALUE = 2**31 - 1


class Mark(NamedTuple):
    """A position between two records of a file: the *offset* in the decompressed content, and the number of lines."""

    offset: int = 0
    num_lines: int = 0


_BEGINNING = Mark()


@dataclass(frozen=True, slots=True)
class Record:
    """A row, the line at which it begins (from 1), and the position after it. *source* is its JSON text, if any."""

    content: dict[str, Any]
    line: int
    end: Mark
    source: str | None = None

    def to_json(self) -> str:
        """Return the row as JSON text. ``json.loads`` of it returns *content*."""
        return self.source or json.dumps(self.content, ensure_ascii=False)


class Lane:
    """Selects every *count*-th row of a stream, beginning with row *number*. *row* rows were counted so far."""

    def __init__(self, number: int = 0, count: int = 1, row: int = 0) -> None:
        self.number, self.count, self.row = number, count, row

    def takes_next(self) -> bool:
        """Count the next row, and return whether it belongs to this lane."""
        is_taken = self.row % self.count == self.number
        self.row += 1
        return is_taken


def read_lane(path: Path, start: Mark, lane: Lane) -> Iterator[Record]:
    """Yield the records of a file that belong to *lane*, as :func:`read_records` does.

    Lines of ``.jsonl`` and ``.txt`` files that belong to other lanes are neither decoded nor parsed.
    """
    read_lines = _READERS_OF_LINES.get(kind_of(path))
    if lane.count == 1 or read_lines is None:
        for record in read_records(path, start):
            if lane.takes_next():
                yield record
        return
    try:
        with open_data(path) as file:
            yield from _read_lane(path, file, start, lane, read_lines)
    except Exception as error:
        if not is_damage(error):
            raise
        raise damaged(path, error) from error


def read_records(path: Path, start: Mark | None = None) -> Iterator[Record]:
    """Yield the records of a file of one of :data:`KINDS`, from *start* on: the ``end`` of a record, or the beginning.

    Raises :class:`RecipeError` with file and line for a line that is not UTF-8, JSON or CSV, for a row with more or
    fewer values than the header, and for a damaged compressed file.
    """
    read = _READERS[kind_of(path)]
    try:
        with open_data(path) as file:
            yield from read(path, file, start or _BEGINNING)
    except Exception as error:
        if not is_damage(error):
            raise
        raise damaged(path, error) from error


def header(path: Path) -> list[str] | None:
    """Return the column names of a CSV or TSV file; None for other formats, and for an empty file."""
    if kind_of(path) not in (".csv", ".tsv"):
        return None
    try:
        with open_data(path) as file:
            return _header(_Lines(path, file, _BEGINNING), _separator(path))
    except Exception as error:
        if not is_damage(error):
            raise
        raise damaged(path, error) from error


def check_tables(paths: Sequence[Path]) -> None:
    """Raise :class:`RecipeError` unless all CSV or TSV files have the same columns, in any order.

    The first rows of each file are read as well, so that a stream reports a broken file before training.
    """
    first_path, first_names = None, None
    for path in paths:
        names = header(path)
        if names is None:
            continue
        if first_names is None:
            first_path, first_names = path, names
        if sorted(names) != sorted(first_names):
            raise RecipeError(
                "a data file has different columns than the first one",
                where=f"{path}:1",
                value=f"{', '.join(names)}; {first_path} has {', '.join(first_names)}",
                hint="give all files the same columns, or list only files that have them",
            )
        for number, _ in enumerate(read_records(path)):
            if number == _FIRST_ROWS:
                break


class _Lines:
    """The lines of an open file as text, with the position after the last line that was read."""

    def __init__(self, path: Path, file: IO[bytes], start: Mark) -> None:
        self.path, self.file = path, file
        self.offset, self.number = start
        # In a compressed file, this decompresses everything before the offset again.
        file.seek(start.offset)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = next(self.file)
        self.number += 1
        self.offset += len(raw)
        return _decoded(raw, self.path, self.number)

    @property
    def mark(self) -> Mark:
        """The position after the last line that was read."""
        return Mark(self.offset, self.number)


def _decoded(raw: bytes, path: Path, line: int) -> str:
    """Decode UTF-8 bytes; *line* is the number of their first line. A byte order mark is removed from line 1."""
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        start_of_line = raw.rfind(b"\n", 0, error.start) + 1
        raise RecipeError(
            "a line is not UTF-8 text",
            where=f"{path}:{line}",
            value=f"byte {raw[error.start]:#04x} at {error.start - start_of_line} of the line",
            hint="save the file as UTF-8",
        ) from error


def _read_lane(
    path: Path,
    file: IO[bytes],
    start: Mark,
    lane: Lane,
    read_line: Callable[[Path, str, Mark], Record | None],
) -> Iterator[Record]:
    """Yield the records of the lines that belong to *lane*. *read_line* makes a record of a line and its end."""
    skips_blank_lines = read_line is _json_record
    file.seek(start.offset)
    offset, number = start
    for raw in file:
        offset += len(raw)
        number += 1
        if skips_blank_lines and raw.isspace():
            continue
        if not lane.takes_next():
            continue
        record = read_line(path, _decoded(raw, path, number), Mark(offset, number))
        if record is not None:
            yield record


def _read_text(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    lines = _Lines(path, file, start)
    for text in lines:
        yield _text_record(path, text, lines.mark)


def _text_record(path: Path, text: str, end: Mark) -> Record:
    # Only the end of the line: other white space belongs to the document.
    document = text.removesuffix("\n").removesuffix("\r")
    return Record({"text": document}, end.num_lines, end)


def _read_json_lines(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    lines = _Lines(path, file, start)
    for text in lines:
        record = _json_record(path, text, lines.mark)
        if record is not None:
            yield record


def _json_record(path: Path, text: str, end: Mark) -> Record | None:
    """The row of a line that ends at *end*; None for a blank line."""
    # A file that was concatenated from several contains byte order marks between lines.
    source = text.strip().removeprefix("\ufeff")
    if not source:
        return None
    try:
        value = _DECODER.decode(source)
    except (ValueError, RecursionError) as error:
        raise _not_json(path, end.num_lines, str(error)) from error
    return Record(_object(value, source, path, end.num_lines), end.num_lines, end, source)


def _read_json(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    """Read a list of objects, a list of texts, or concatenated objects. A mark's offset counts characters here."""
    if _has_object_per_line(file):
        yield from _read_json_lines(path, file, start)
        return
    file.seek(0)
    text = _decoded(file.read(), path, 1)
    position, num_lines = start
    position = _after_blanks(text, position)
    is_list = text.lstrip(_BLANK).startswith("[")
    if is_list and start.offset == 0:
        position = _after_blanks(text, position + 1)
    counted = start.offset
    while position < len(text) and not (is_list and text[position] == "]"):
        num_lines += text.count("\n", counted, position)
        counted = position
        line = num_lines + 1
        value, position = _decode_at(text, position, path, line)
        source = text[counted:position]
        if is_list and isinstance(value, str):
            value, source = {"text": value}, ""
        content = _object(value, source, path, line)
        position = _after_separator(text, position, path, is_list)
        num_lines += text.count("\n", counted, position)
        counted = position
        yield Record(content, line, Mark(position, num_lines), source or None)
    if is_list:
        _check_end(text, position, path)


def _has_object_per_line(file: IO[bytes]) -> bool:
    """Whether the first line that is not blank is a complete object."""
    first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _decode_at(text: str, position: int, path: Path, line: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise _not_json(path, error.lineno, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _not_json(path, line, str(error)) from error


def _after_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in _BLANK:
        position += 1
    return position


def _after_separator(text: str, position: int, path: Path, is_list: bool) -> int:
    """Return the position of the next value, or of the end of the list or file."""
    position = _after_blanks(text, position)
    if not is_list or text[position : position + 1] == "]":
        return position
    if text[position : position + 1] != ",":
        raise _not_json(
            path, text.count("\n", 0, position) + 1, "a comma or ] is missing between two objects"
        )
    following = _after_blanks(text, position + 1)
    if text[following : following + 1] in ("", "]"):
        raise _not_json(path, text.count("\n", 0, position) + 1, "no object follows after a comma")
    return following


def _check_end(text: str, position: int, path: Path) -> None:
    line = text.count("\n", 0, position) + 1
    if text[position : position + 1] != "]":
        raise _not_json(path, line, "the list does not end with ]")
    if text[position + 1 :].strip():
        raise _not_json(path, line, "more text follows after the end of the list")


def _object(value: Any, source: str, path: Path, line: int) -> dict[str, Any]:
    """Return *value* if it is a row; null is a row without fields. Raises :class:`RecipeError` for other values."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _not_json(path, line, f"not an object with fields, but {json.dumps(value)[:40]}")
    # json.loads accepts half of a surrogate pair, which cannot be encoded in UTF-8 later.
    if _SURROGATE.search(source):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _not_json(path, line, "half of a surrogate pair, such as \\ud800") from error
    return value


def _not_json(path: Path, line: int, reason: str) -> RecipeError:
    hint = "correct or remove this line"
    return RecipeError("a line is not JSON", where=f"{path}:{line}", value=reason, hint=hint)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # By default, json keeps the last of several values of a field without a message.
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"duplicate field, among {', '.join(name for name, _ in pairs)}")
    return row


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"number {text[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite)


def _read_table(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    separator = _separator(path)
    lines = _Lines(path, file, _BEGINNING)
    names = _header(lines, separator)
    if names is None:
        return
    if start.offset:
        lines = _Lines(path, file, start)
    for line, values in _rows(lines, separator):
        if len(values) != len(names):
            raise _other_length(values, names, separator, f"{path}:{line}")
        content = {name: value or None for name, value in zip(names, values, strict=True)}
        # csv.reader reads no line ahead, so the mark is the end of this row.
        yield Record(content, line, lines.mark)


def _separator(path: Path) -> str:
    return "\t" if kind_of(path) == ".tsv" else ","


def _header(lines: _Lines, separator: str) -> list[str] | None:
    _, names = next(_rows(lines, separator), (0, None))
    return None if names is None else _distinct(names)


def _rows(lines: _Lines, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which a row begins, and its values as texts. Blank lines are skipped."""
    split = _split_csv if separator == "," else _split_tabs
    before = lines.number
    for values in split(lines):
        is_blank = len(values) <= 1 and not "".join(values).strip()
        if not is_blank:
            yield before + 1, values
        before = lines.number


def _split_tabs(lines: _Lines) -> Iterator[list[str]]:
    for text in lines:
        yield text.removesuffix("\n").removesuffix("\r").split("\t")


def _split_csv(lines: _Lines) -> Iterator[list[str]]:
    # The limit is global: the csv module has none for a single reader.
    csv.field_size_limit(_LONGEST_CSV_VALUE)  # by default a value of 128 KiB is an error
    # If not strict, csv.reader accepts text after a closing quote as part of the value.
    reader = csv.reader(lines, strict=True)
    before = lines.number
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise RecipeError(
                "a row is not CSV",
                where=f"{lines.path}:{before + 1}",
                value=str(error),
                hint='put quotes around values with commas, line breaks or quotes, and write " inside of them as ""',
            ) from error
        before = lines.number
        yield values


def _distinct(names: Sequence[str]) -> list[str]:
    """Make column names unique, numbered as in pandas: ``a``, ``a.1``. An empty name gets the number of its column."""
    counts: Counter[str] = Counter()
    found = []
    for column, given in enumerate(names):
        name = given or f"Unnamed: {column}"
        found.append(f"{name}.{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return found


def _other_length(
    values: Sequence[str], names: Sequence[str], separator: str, where: str
) -> RecipeError:
    is_longer = len(values) > len(names)
    if not is_longer:
        hint = "give every row a value for each column; an empty one is enough"
    elif separator == ",":
        hint = "put quotes around values with commas in them, or name all columns in the first line"
    else:
        hint = "remove tabs from the values, or name all columns in the first line"
    more_or_fewer = "more" if is_longer else "fewer"
    return RecipeError(
        f"a row has {more_or_fewer} values than the table has columns",
        where=where,
        value=f"{len(values)} values for {', '.join(names)}",
        hint=hint,
    )


_READERS: dict[str, Callable[[Path, IO[bytes], Mark], Iterator[Record]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".txt": _read_text,
}


_READERS_OF_LINES: dict[str, Callable[[Path, str, Mark], Record | None]] = {
    ".jsonl": _json_record,
    ".txt": _text_record,
}


class RecordTable:
    """The rows of several files in memory, as JSON text that is parsed when a row is used.

    *fields* are all fields that occur in a row.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        check_tables(files)
        fields: dict[str, None] = {}
        # Three buffers and not a list of objects: forked workers share them, because no reference count changes.
        texts = bytearray()
        ends = array("q", [0])
        lines = array("q")
        file_ends: list[int] = []
        for file in files:
            fields.update(dict.fromkeys(header(file) or ()))
            for record in read_records(file):
                fields.update(dict.fromkeys(record.content))
                texts += record.to_json().encode()
                ends.append(len(texts))
                lines.append(record.line)
            file_ends.append(len(lines))
        self.fields = list(fields)
        self._files = list(files)
        self._file_ends = file_ends
        self._texts = texts
        self._ends = ends
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, number: int) -> dict[str, Any]:
        """Return the fields of a row."""
        text = self._texts[self._ends[number] : self._ends[number + 1]]
        # A row without fields may be written as null.
        return json.loads(text.decode()) or {}

    def place(self, number: int) -> str:
        """Return the file and line of a row."""
        file = self._files[bisect_right(self._file_ends, number)]
        return f"{file}:{self._lines[number]}"


class RecordStream:
    """Iterates over the rows of several files, as pairs of content and location. Rows are read when they are used.

    The state is the position after the last row, so a resume does not read the rows before it. :attr:`fields` are those
    of the first 1000 rows.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        check_tables(files)
        self._files = list(files)
        self._limit: int | None = None
        self._lane = (0, 1)
        self._state: dict[str, int] = _state_at(0, _BEGINNING, 0)
        fields: dict[str, None] = {}
        for file in files:
            fields.update(dict.fromkeys(header(file) or ()))
        self.is_empty = True
        for number, (content, _) in enumerate(self):
            self.is_empty = False
            fields.update(dict.fromkeys(content))
            if number == _FIRST_ROWS:
                break
        self.fields = list(fields)
        # Reading the first rows has moved the state.
        self._state = _state_at(0, _BEGINNING, 0)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], str]]:
        state = self._state
        lane = Lane(*self._lane, row=state["row"])
        start = Mark(state["offset"], state["num_lines"])
        for number in range(state["file"], len(self._files)):
            for record in read_lane(self._files[number], start, lane):
                if self._limit is not None and lane.row > self._limit:
                    return
                # Set before the yield: a state that is saved during it is the state after this row.
                self._state = _state_at(number, record.end, lane.row)
                yield record.content, f"{self._files[number]}:{record.line}"
            start = _BEGINNING

    def take(self, limit: int) -> RecordStream:
        """Return a stream of the first *limit* rows."""
        # A shallow copy is enough, because a state is replaced and never changed in place.
        stream = copy.copy(self)
        stream._limit = limit
        return stream

    def lane(self, number: int, count: int) -> RecordStream:
        """Return a stream of every *count*-th row, beginning with row *number*, from the beginning."""
        stream = copy.copy(self)
        stream._lane = (number, count)
        stream._state = _state_at(0, _BEGINNING, 0)
        return stream

    def state_dict(self) -> dict[str, int]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = dict(state)

    def state_after(self, num_rows: int) -> dict[str, int]:
        """Return the state after the first *num_rows* rows. Reads these rows."""
        others = self.take(num_rows)
        others.load_state_dict(_state_at(0, _BEGINNING, 0))
        for _ in others:
            pass
        return others.state_dict()


def _state_at(file: int, mark: Mark, row: int) -> dict[str, int]:
    return {"file": file, "offset": mark.offset, "num_lines": mark.num_lines, "row": row}
