"""A record of a data file, and the lines that it is read from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

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

    def __init__(self, path: Path, file: IO[bytes], start: Mark) -> None:
        self.path, self.file = path, file
        self.offset, self.number = start
        # In a compressed file, this decompresses everything before the offset again.
        file.seek(start.offset)

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
