"""Read records of CSV and TSV files. All values are texts; an empty value is None.

CSV follows RFC 4180: a value in double quotes may contain commas, line breaks and doubled quotes. TSV has no quoting:
a double quote is an ordinary character, and a value cannot contain a tab or a line break.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from automodel_ckpt.data.rows.files import kind_of
from automodel_ckpt.data.rows.records import BEGINNING, Lines, Mark, Record
from automodel_ckpt.errors import RecipeError

# The csv module keeps the limit in a C long, which has 32 bits on some platforms.
_LONGEST_CSV_VALUE = 2**31 - 1


def read_table(path: Path, file: IO[bytes], start: Mark) -> Iterator[Record]:
    """Yield the rows of a table.

    Raises :class:`RecipeError` for a row that is not CSV, or has more or fewer values than the table has columns.
    """
    separator = separator_of(path)
    lines = Lines(path, file, BEGINNING)
    names = column_names(lines, separator)
    if names is None:
        return
    if start.offset:
        lines = Lines(path, file, start)
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
