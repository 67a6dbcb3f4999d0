"""Read records of JSON files: one object per line, or a list of objects or texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.data.rows.records import Lines, Mark, Record, decoded
from automodel_ckpt.errors import RecipeError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# The white space of JSON. str.strip() removes characters that are not allowed there.
_BLANK = " \t\n\r"


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
    if _has_object_per_line(file):
        yield from read_json_lines(path, file, start)
        return
    file.seek(0)
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
