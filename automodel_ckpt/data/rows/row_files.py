"""Read the rows of JSON, CSV, TSV and text files without type inference.

A row depends only on its own line: text that looks like a date is text, ``1`` is an integer even if another row has
``2.5``, integers of any size are exact, and a key that only other rows have is missing. Values of CSV and TSV files are
text; an empty value is None.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.data.rows.files import advance, kind_of, opened
from automodel_ckpt.data.rows.records import (
    BEGINNING,
    Lane,
    Lines,
    Mark,
    Record,
    column_names,
    decoded,
    json_record,
    read_json,
    read_json_lines,
    read_table,
    separator_of,
)
from automodel_ckpt.errors import RecipeError

KINDS = frozenset({".jsonl", ".json", ".csv", ".tsv", ".txt"})
"""Suffixes of the files that this module reads."""
FIRST_ROWS = 1000
"""Number of rows that are read of a file before training, to find mistakes and fields."""


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
    with opened(path) as file:
        yield from _read_lane(path, file, start, lane, read_lines)


def read_records(path: Path, start: Mark | None = None) -> Iterator[Record]:
    """Yield the records of a file of one of :data:`KINDS`, from *start* on: the ``end`` of a record, or the beginning.

    Raises :class:`RecipeError` with file and line for a line that is not UTF-8, JSON or CSV, for a row with more or
    fewer values than the header, and for a damaged compressed file.
    """
    with opened(path) as file:
        yield from _READERS[kind_of(path)](path, file, start or BEGINNING)


def header(path: Path) -> list[str] | None:
    """Return the column names of a CSV or TSV file; None for other formats, and for an empty file."""
    if kind_of(path) not in (".csv", ".tsv"):
        return None
    with opened(path) as file:
        return column_names(Lines(path, file), separator_of(path))


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
            if number == FIRST_ROWS:
                break


def _read_lane(
    path: Path,
    file: IO[bytes],
    start: Mark,
    lane: Lane,
    read_line: Callable[[Path, str, Mark], Record | None],
) -> Iterator[Record]:
    """Yield the records of the lines that belong to *lane*. *read_line* makes a record of a line and its end."""
    skips_blank_lines = read_line is json_record
    advance(file, 0, start.offset)
    offset, number = start
    for raw in file:
        offset += len(raw)
        number += 1
        if skips_blank_lines and raw.isspace():
            continue
        if not lane.takes_next():
            continue
        record = read_line(path, decoded(raw, path, number), Mark(offset, number))
        if record is not None:
            yield record


def _read_text(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    lines = Lines(path, file, start)
    for text in lines:
        yield _text_record(path, text, lines.mark)


def _text_record(path: Path, text: str, end: Mark) -> Record:
    # Only the end of the line: other white space belongs to the document.
    document = text.removesuffix("\n").removesuffix("\r")
    return Record({"text": document}, end.num_lines, end)


_READERS: dict[str, Callable[[Path, IO[bytes], Mark], Iterator[Record]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_table,
    ".tsv": read_table,
    ".txt": _read_text,
}
_READERS_OF_LINES: dict[str, Callable[[Path, str, Mark], Record | None]] = {
    ".jsonl": json_record,
    ".txt": _text_record,
}


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
        self._state: dict[str, int] = _state_at(0, BEGINNING, 0)
        fields: dict[str, None] = {}
        for file in files:
            fields.update(dict.fromkeys(header(file) or ()))
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
            for record in read_lane(self._files[number], start, lane):
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

    def state_after(self, num_rows: int) -> dict[str, int]:
        """Return the state after the first *num_rows* rows. Reads these rows."""
        others = self.take(num_rows)
        others.load_state_dict(_state_at(0, BEGINNING, 0))
        for _ in others:
            pass
        return others.state_dict()


def _state_at(file: int, mark: Mark, row: int) -> dict[str, int]:
    return {"file": file, "offset": mark.offset, "num_lines": mark.num_lines, "row": row}
