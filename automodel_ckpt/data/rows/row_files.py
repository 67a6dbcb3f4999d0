"""Read the rows of JSON, CSV, TSV and text files without type inference.

A row depends only on its own line: text that looks like a date is text, ``1`` is an integer even if another row has
``2.5``, integers of any size are exact, and a key that only other rows have is missing.

A JSON file has one object per line, or a list of objects or texts. All values of tables are texts; an empty value is
None. CSV follows RFC 4180: a value in double quotes may contain commas, line breaks and doubled quotes. TSV has no
quoting: a double quote is an ordinary character, and a value cannot contain a tab or a line break.
"""

from __future__ import annotations

import copy
import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from automodel_ckpt.data.rows.files import advance, kind_of, opened
from automodel_ckpt.errors import RecipeError

KINDS = frozenset({".jsonl", ".json", ".csv", ".tsv", ".txt"})
"""Suffixes of the files that this module reads."""
FIRST_ROWS = 1000
"""Number of rows that are read of a file before training, to find mistakes and fields."""


class Mark(NamedTuple):
    """A position between two records of a file: the *offset* in the decompressed content, and the number of lines.

    In a JSON list, the offset counts characters.
    """

    offset: int = 0
    num_lines: int = 0


BEGINNING = Mark()


@dataclass(frozen=True)
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


def read_records(path: Path, start: Mark = BEGINNING, lane: Lane | None = None) -> Iterator[Record]:
    """Yield the records of a file of one of :data:`KINDS` that belong to *lane*, from *start* on, the end of a record.

    Lines of ``.jsonl`` and ``.txt`` files that belong to other lanes are neither decoded nor parsed. Raises
    :class:`RecipeError` with file and line for a line that is not UTF-8, JSON or CSV, for a row with more or fewer
    values than the header, and for a damaged compressed file.
    """
    lane = lane or Lane()
    kind = kind_of(path)
    with opened(path) as file:
        if kind in (".jsonl", ".txt"):
            yield from _read_lines(path, file, start, lane, is_json=kind == ".jsonl")
            return
        for record in (_read_json if kind == ".json" else _read_table)(path, file, start):
            if lane.takes_next():
                yield record


def check_tables(paths: Sequence[Path]) -> dict[str, None]:
    """Return the column names of CSV or TSV files. Raise :class:`RecipeError` unless all have the same, in any order.

    The first rows of each file are read as well, so that a stream reports a broken file before training.
    """
    first_path, first_names = None, None
    for path in paths:
        if kind_of(path) not in (".csv", ".tsv"):
            continue
        with opened(path) as file:
            names = _column_names(_table_rows(Lines(path, file)), path)
        if names is None:
            continue
        if first_names is None:
            first_path, first_names = path, names
        if sorted(names) != sorted(first_names):
            raise RecipeError(
                "a data file has different columns than the first one",
                where=f"{path}:1",
                value=f"{', '.join(names)}; {first_path} has {', '.join(first_names)}",
                hint="",
            )
        for _ in islice(read_records(path), FIRST_ROWS + 1):
            pass
    return dict.fromkeys(first_names or ())


class Lines:
    """The lines of an open file as text, with the position after the last line that was read."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.mark = BEGINNING

    def advance(self, mark: Mark) -> None:
        """Continue at a later *mark*."""
        advance(self.file, self.mark.offset, mark.offset)
        self.mark = mark

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        raw = next(self.file)
        self.mark = Mark(self.mark.offset + len(raw), self.mark.num_lines + 1)
        return _decoded(raw, self.path, self.mark.num_lines)


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
            hint="save the file as UTF-8; the name of a compressed file ends in .gz, .bz2, .xz or .zst",
        ) from error


def _read_lines(
    path: Path, file: IO[bytes], start: Mark, lane: Lane, *, is_json: bool
) -> Iterator[Record]:
    """Yield a record for each line of the lane: an object, or a text."""
    advance(file, 0, start.offset)
    offset, number = start
    for raw in file:
        offset += len(raw)
        number += 1
        if (is_json and raw.isspace()) or not lane.takes_next():
            continue
        text, end = _decoded(raw, path, number), Mark(offset, number)
        if not is_json:
            # Only the end of the line: other white space belongs to the document.
            document = text.removesuffix("\n").removesuffix("\r")
            yield Record({"text": document}, number, end)
            continue
        # A file that was concatenated from several contains byte order marks between lines.
        if source := text.strip().removeprefix("\ufeff"):
            try:
                value = _DECODER.decode(source)
            except (ValueError, RecursionError) as error:
                raise _not_json(path, number, str(error)) from error
            yield Record(_object(value, source, path, number), number, end, source)


_JSON_HINT = "correct or remove this line; rows are objects: each in a line, or in a .json file all in one list"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BLANKS = re.compile(r"[ \t\n\r]*")
"""The white space of JSON. str.strip() removes characters that are not allowed there."""


def _read_json(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    """Read a list of objects or texts, or one object per line."""
    if _has_object_per_line(path):
        yield from _read_lines(path, file, start, Lane(), is_json=True)
        return
    text = _decoded(file.read(), path, 1)
    if not text.strip():
        return
    # The whole file is checked first, so that the rows are found by position.
    try:
        is_list = isinstance(json.loads(text), list)
    except (ValueError, RecursionError) as error:
        raise _not_json(path, getattr(error, "lineno", 1), str(error)) from error
    if not is_list:
        raise _not_json(path, 1, f"neither a list nor an object per line: {text[:40]!r}")
    position, num_lines = start
    if position == 0:
        position = _after_blanks(text, _after_blanks(text, 0) + 1)
        num_lines = text.count("\n", 0, position)
    # At a position from a state, the file may be another one, and end earlier.
    while not text.startswith("]", position):
        line = num_lines + 1
        try:
            value, end = _DECODER.raw_decode(text, position)
        except ValueError as error:
            raise _not_json(path, line, str(error)) from error
        source = text[position:end]
        if isinstance(value, str):
            value, source = {"text": value}, ""
        content = _object(value, source, path, line)
        following = _after_blanks(text, end)
        if text.startswith(",", following):
            following = _after_blanks(text, following + 1)
        num_lines += text.count("\n", position, following)
        position = following
        yield Record(content, line, Mark(position, num_lines), source or None)


def _has_object_per_line(path: Path) -> bool:
    """Whether the first line that is not blank is a complete object."""
    with opened(path) as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _after_blanks(text: str, position: int) -> int:
    found = _BLANKS.match(text, position)
    return found.end() if found else position


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
    where = f"{path}:{line}"
    return RecipeError("a line is not JSON", where=where, value=reason, hint=_JSON_HINT)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # By default, json keeps the last of several values of a field without a message.
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"duplicate field, among {', '.join(name for name, _ in pairs)}")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


# The csv module keeps the limit in a C long, which has 32 bits on some platforms.
_LONGEST_CSV_VALUE = 2**31 - 1
_TableRows = Iterator[tuple[int, list[str]]]


def _read_table(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    """Yield the rows of a table."""
    lines = Lines(path, file)
    rows = _table_rows(lines)
    names = _column_names(rows, path) or []
    if start.offset:
        lines.advance(start)
    for line, values in rows:
        if len(values) != len(names):
            raise RecipeError(
                "a row has more or fewer values than the table has columns",
                where=f"{path}:{line}",
                value=f"{len(values)} values for {', '.join(names)}",
                hint="give every row a value for each column (an empty one is enough), and put quotes around values "
                "with commas; a value of a .tsv file cannot contain a tab",
            )
        content = {name: value or None for name, value in zip(names, values, strict=True)}
        # csv.reader reads no line ahead, so the mark is the end of this row.
        yield Record(content, line, lines.mark)


def _table_rows(lines: Lines) -> _TableRows:
    """Yield the line at which a row begins, and its values as texts. Blank lines are skipped."""
    # If not strict, csv.reader accepts text after a closing quote as part of the value.
    form: dict[str, Any] = {"strict": True}
    if kind_of(lines.path) == ".tsv":
        form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    # The limit is global: the csv module has none for a single reader.
    csv.field_size_limit(_LONGEST_CSV_VALUE)  # by default a value of 128 KiB is an error
    split = csv.reader(lines, **form)
    while True:
        line = lines.mark.num_lines + 1
        try:
            values = next(split)
        except StopIteration:
            return
        except csv.Error as error:
            raise RecipeError(
                "a row is not CSV or TSV",
                where=f"{lines.path}:{line}",
                value=str(error),
                hint='put quotes around values with commas, line breaks or quotes, and write " inside of them as ""',
            ) from error
        if len(values) > 1 or "".join(values).strip():
            yield line, values


def _column_names(rows: _TableRows, path: Path) -> list[str] | None:
    """Return the column names in the first row, or None without a row. An empty name gets the number of its column.

    Raises :class:`RecipeError` for two columns with the same name.
    """
    line, given = next(rows, (0, None))
    if given is None:
        return None
    names = [name or f"Unnamed: {column}" for column, name in enumerate(given)]
    if len(set(names)) < len(names):
        raise RecipeError(
            "two columns of a table have the same name",
            where=f"{path}:{line}",
            value=", ".join(names),
            hint="",
        )
    return names


class RecordStream:
    """Iterates over the rows of several files, as pairs of content and location. Rows are read when they are used.

    The state is the position after the last row, so a resume does not read the rows before it. :attr:`fields` are the
    fields of the first 1000 rows.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        fields = check_tables(files)
        self._files = list(files)
        self._limit: int | None = None
        self._lane = (0, 1)
        self._state: dict[str, int] = _state_at(0, BEGINNING, 0)
        self.is_empty = True
        for number, (content, _) in enumerate(self):
            self.is_empty = False
            fields.update(dict.fromkeys(content))
            if number == FIRST_ROWS:
                break
        self.fields = list(fields)
        # Reading the first rows has moved the state.
        self._state = _state_at(0, BEGINNING, 0)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], str]]:
        state = self._state
        lane = Lane(*self._lane, row=state["row"])
        start = Mark(state["offset"], state["num_lines"])
        for number in range(state["file"], len(self._files)):
            for record in read_records(self._files[number], start, lane):
                if self._limit is not None and lane.row > self._limit:
                    return
                # Set before the yield: a state that is saved during it is the state after this row.
                self._state = _state_at(number, record.end, lane.row)
                yield record.content, f"{self._files[number]}:{record.line}"
            start = BEGINNING

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
        stream._state = _state_at(0, BEGINNING, 0)
        return stream

    def state_dict(self) -> dict[str, int]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = dict(state)


def _state_at(file: int, mark: Mark, row: int) -> dict[str, int]:
    return {"file": file, "offset": mark.offset, "num_lines": mark.num_lines, "row": row}
