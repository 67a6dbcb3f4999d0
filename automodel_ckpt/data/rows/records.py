"""Read the records of JSON, CSV and TSV files.

A JSON file has one object per line, or a list of objects or texts. All values of tables are texts; an empty value is
None. CSV follows RFC 4180: a value in double quotes may contain commas, line breaks and doubled quotes. TSV has no
quoting: a double quote is an ordinary character, and a value cannot contain a tab or a line break.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from automodel_ckpt.data.rows.files import advance, kind_of, opened
from automodel_ckpt.errors import RecipeError


class Mark(NamedTuple):
    """A position between two records of a file: the *offset* in the decompressed content, and the number of lines."""

    offset: int = 0
    num_lines: int = 0


BEGINNING = Mark()


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


class Lines:
    """The lines of an open file as text, with the position after the last line that was read."""

    def __init__(self, path: Path, file: IO[bytes], start: Mark = BEGINNING) -> None:
        self.path, self.file = path, file
        self.offset, self.number = 0, 0
        self.advance(start)

    def advance(self, mark: Mark) -> None:
        """Continue at a later *mark*."""
        advance(self.file, self.offset, mark.offset)
        self.offset, self.number = mark

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        raw = next(self.file)
        self.number += 1
        self.offset += len(raw)
        return decoded(raw, self.path, self.number)

    @property
    def mark(self) -> Mark:
        """The position after the last line that was read."""
        return Mark(self.offset, self.number)


def decoded(raw: bytes, path: Path, line: int) -> str:
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


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BLANKS = re.compile(r"[ \t\n\r]*")
"""The white space of JSON. str.strip() removes characters that are not allowed there."""


def read_json_lines(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    """Yield the records of a file with one object per line. Raises :class:`RecipeError` for a line that is not JSON."""
    lines = Lines(path, file, start)
    for text in lines:
        record = json_record(path, text, lines.mark)
        if record is not None:
            yield record


def json_record(path: Path, text: str, end: Mark) -> Record | None:
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


def read_json(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    """Read a list of objects or texts, or one object per line. A mark's offset counts characters of a list here."""
    if _has_object_per_line(path):
        yield from read_json_lines(path, file, start)
        return
    text = decoded(file.read(), path, 1)
    position, num_lines = start
    if position == 0:
        position = _after_blanks(text, 0)
        if text[position : position + 1] != "[":
            if position < len(text):
                raise RecipeError(
                    "the file has neither a list of objects nor an object per line",
                    where=str(path),
                    value=repr(text[:40]),
                    hint="write the rows as one list, or each row in one line",
                )
            return
        position = _after_blanks(text, position + 1)
    counted = start.offset
    while position < len(text) and text[position] != "]":
        num_lines += text.count("\n", counted, position)
        counted = position
        line = num_lines + 1
        value, position = _decode_at(text, position, path, line)
        source = text[counted:position]
        if isinstance(value, str):
            value, source = {"text": value}, ""
        content = _object(value, source, path, line)
        position = _after_separator(text, position, path)
        num_lines += text.count("\n", counted, position)
        counted = position
        yield Record(content, line, Mark(position, num_lines), source or None)
    _check_end(text, position, path)


def _has_object_per_line(path: Path) -> bool:
    """Whether the first line that is not blank is a complete object."""
    with opened(path) as file:
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
    found = _BLANKS.match(text, position)
    return found.end() if found else position


def _after_separator(text: str, position: int, path: Path) -> int:
    """Return the position of the next value, or of the end of the list."""
    position = _after_blanks(text, position)
    if text[position : position + 1] == "]":
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
        reason = f"not an object with fields, but {json.dumps(value)[:40]}"
        if isinstance(value, list) and line == 1 and ".jsonl" in path.suffixes:
            raise _not_json(path, line, reason, "name a file that is one list *.json, not *.jsonl")
        raise _not_json(path, line, reason)
    # json.loads accepts half of a surrogate pair, which cannot be encoded in UTF-8 later.
    if _SURROGATE.search(source):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _not_json(path, line, "half of a surrogate pair, such as \\ud800") from error
    return value


def _not_json(
    path: Path, line: int, reason: str, hint: str = "correct or remove this line"
) -> RecipeError:
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


# The csv module keeps the limit in a C long, which has 32 bits on some platforms.
_LONGEST_CSV_VALUE = 2**31 - 1


def read_table(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    """Yield the rows of a table.

    Raises :class:`RecipeError` for a row that is not CSV, or has more or fewer values than the table has columns.
    """
    separator = separator_of(path)
    lines = Lines(path, file)
    names = column_names(lines, separator)
    if names is None:
        return
    if start.offset:
        lines.advance(start)
    for line, values in _rows(lines, separator):
        if len(values) != len(names):
            raise _other_length(values, names, separator, f"{path}:{line}")
        content = {name: value or None for name, value in zip(names, values, strict=True)}
        # csv.reader reads no line ahead, so the mark is the end of this row.
        yield Record(content, line, lines.mark)


def separator_of(path: Path) -> str:
    """Return what separates the values of a row: a tab in TSV files, else a comma."""
    return "\t" if kind_of(path) == ".tsv" else ","


def column_names(lines: Lines, separator: str) -> list[str] | None:
    """Return the column names in the first row; None if there is no row."""
    _, names = next(_rows(lines, separator), (0, None))
    return None if names is None else _distinct(names)


def _rows(lines: Lines, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which a row begins, and its values as texts. Blank lines are skipped."""
    split = _split_csv if separator == "," else _split_tabs
    before = lines.number
    for values in split(lines):
        is_blank = len(values) <= 1 and not "".join(values).strip()
        if not is_blank:
            yield before + 1, values
        before = lines.number


def _split_tabs(lines: Lines) -> Iterator[list[str]]:
    for text in lines:
        yield text.removesuffix("\n").removesuffix("\r").split("\t")


def _split_csv(lines: Lines) -> Iterator[list[str]]:
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
    """Make column names unique, numbered as in pandas: ``a``, ``a.1``. An empty name gets the number of its column.

    A number that would make the name of another column is skipped.
    """
    wanted = [given or f"Unnamed: {column}" for column, given in enumerate(names)]
    taken = set(wanted)
    counts: Counter[str] = Counter()
    found = []
    for name in wanted:
        unique = name
        if counts[name]:
            while (unique := f"{name}.{counts[name]}") in taken:
                counts[name] += 1
            taken.add(unique)
        counts[name] += 1
        found.append(unique)
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
