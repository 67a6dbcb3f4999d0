"""Tables of rows: their fields as columns of values or texts, and the location of each row for error messages."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from automodel_ckpt.base.bounded_templates import BoundedEnvironment
from automodel_ckpt.data.rows.row_files import check_tables, read_records
from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.data.collate import Where


def is_template(field: str) -> bool:
    """Whether *field* is a template, and not the name of a field."""
    return "{{" in field or "{%" in field


def names_in(field: str) -> list[str]:
    """List the fields that *field* reads. Raises :class:`RecipeError` for an invalid template."""
    if is_template(field):
        return FieldTemplate(field).names
    return [field]


class FieldTemplate:
    """A template of the fields of a row. A field that is missing or null is written as empty text."""

    def __init__(self, text: str) -> None:
        environment = BoundedEnvironment(
            keep_trailing_newline=True, finalize=lambda value: "" if value is None else value
        )
        try:
            undeclared = find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        # Jinja compiles to Python. Python's compiler raises the last three for a template that is nested too deeply.
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise RecipeError(
                "a field template is not valid Jinja",
                where="dataset",
                value=f"{str(error)[:200]} in {text[:80]!r}",
                hint="write fields as {{ name }} and optional parts as {% if name %}...{% endif %}",
            ) from error
        self.names = sorted(undeclared - environment.globals.keys())

    def write(self, row: Mapping[str, Any], where: Where) -> str:
        """Write the text of a row. Raises :class:`RecipeError` with the location ``where()`` if the template fails."""
        try:
            return self._template.render(row)
        except Exception as error:  # a template can raise anything, for example divide by zero
            value = f"{type(error).__name__}: {error}"
            raise RecipeError(
                "a field template fails on a sample", where(), value, CORRECT_SAMPLE
            ) from error


CORRECT_SAMPLE = "correct or remove this sample"
_FIRST_ROWS = 100
Columns = list[list[Any]]
"""The values of several fields, row by row."""
Row = dict[str, Any]


class Rows:
    """A table of rows that become samples. Each row has a location, which error messages report."""

    path: str

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        raise NotImplementedError

    @property
    def fields(self) -> Sequence[str]:
        """The names of all fields that occur."""
        raise NotImplementedError

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        """The values of each field in the rows *start* to *stop*: None where a row does not have the field."""
        raise NotImplementedError

    def row(self, number: int) -> Row:
        """The fields of one row; None for fields that only other rows have."""
        columns = self.read_range(self.fields, number, number + 1)
        return {name: column[0] for name, column in zip(self.fields, columns, strict=True)}

    def place(self, row: int) -> str:
        """The location of a row: file and line, or the number of the row from 0."""
        raise NotImplementedError

    def class_names(self, field: str) -> Sequence[str] | None:
        """The names that the data gives to the numbers of a field (ClassLabel), also in lists; None without such."""
        return None

    def values(self, field: str) -> list[Any]:
        """The values of one field, row by row."""
        [values] = self.columns([field])
        return values

    def columns(self, fields: Sequence[str]) -> Columns:
        """The values of each field, row by row. Raises :class:`RecipeError` for no rows, or for an unknown field."""
        self.require(fields)
        return self.read_range(fields, 0, self.num_rows)

    def unusable(
        self, row: int, what: str, value: object, hint: str = CORRECT_SAMPLE
    ) -> RecipeError:
        """Make the error for a row that cannot be a sample, with its location."""
        return RecipeError(what, where=self.place(row), value=value, hint=hint)

    def require(self, fields: Sequence[str]) -> None:
        """Raise :class:`RecipeError` if there are no rows, or if no row has one of *fields*."""
        if self.num_rows == 0:
            raise empty_data(self.path)
        missing = [field for field in fields if field not in self.fields]
        if missing:
            what = "field" if len(missing) == 1 else "fields"
            raise RecipeError(
                f"the data has no {what} {', '.join(missing)}",
                where=self.path,
                value=f"its fields are {', '.join(self.fields)}",
                hint="name the fields of the data in the dataset section (field, or a key that ends in _field, such as "
                "completion_field), or use the builder that reads these fields (docs/reference/data.md)",
            )

    def texts(self, fields: Sequence[str]) -> list[list[str]]:
        """A column of texts for each of *fields*, which are names of fields or templates of several.

        Raises :class:`RecipeError` with the row's location for a value that is not text.
        """
        names = _names_in_all(fields)
        values = dict(zip(names, self.columns(names), strict=True))
        columns = []
        for field in fields:
            if not is_template(field):
                for number, value in enumerate(values[field]):
                    if not isinstance(value, str):
                        raise self.no_text(number, field, value)
                columns.append(values[field])
                continue
            template = FieldTemplate(field)
            columns.append([])
            for number in range(self.num_rows):
                row = {name: values[name][number] for name in template.names}
                columns[-1].append(template.write(row, partial(self.place, number)))
        return columns

    def contain_messages(self, fields: Sequence[str]) -> bool:
        """Whether one of these fields contains lists of messages.

        Raises :class:`RecipeError` for no rows, or for an unknown field.
        """
        self.require(_names_in_all(fields))
        names = [field for field in fields if not is_template(field)]
        return any(self.has_messages(name) for name in names)

    def has_messages(self, field: str) -> bool:
        """Whether the first value of a field that is not empty is a list of messages."""
        if field not in self._has_messages:
            first = None
            for start in range(0, self.num_rows, _FIRST_ROWS):
                [values] = self.read_range([field], start, min(start + _FIRST_ROWS, self.num_rows))
                if first := next(filter(None, values), None):
                    break
            is_list = isinstance(first, list) and isinstance(first[0], Mapping)
            self._has_messages[field] = is_list
        return self._has_messages[field]

    @cached_property
    def _has_messages(self) -> dict[str, bool]:
        return {}

    def no_text(
        self, row: int, field: str, value: object, expected: str = "not text"
    ) -> RecipeError:
        """Make the error for a *value* in a field of a row that is not what is *expected*."""
        reason = "missing" if value is None else expected
        return self.unusable(row, f"field {field} of a sample is {reason}", value)


class ColumnRows(Rows):
    """A table of *columns* by name, with the locations of its rows. *source* knows the names of classes, if any."""

    def __init__(
        self, path: str, columns: Mapping[str, list[Any]], places: Sequence[str], source: Any = None
    ) -> None:
        self.path, self._columns, self._places, self._source = path, columns, places, source

    @classmethod
    def of(
        cls, path: str, rows: Sequence[tuple[Mapping[str, Any], str | None]], stream: Any = None
    ) -> Self:
        """Make a table of some *rows* of a *stream*, pairs of content and place."""
        # With the fields of other rows: a field that only these rows lack is null, not unknown.
        names = dict.fromkeys(
            chain(getattr(stream, "fields", ()), *(content for content, _ in rows))
        )
        columns = {name: [content.get(name) for content, _ in rows] for name in names}
        return cls(
            path, columns, [place or f"{path}, a row of the stream" for _, place in rows], stream
        )

    @property
    def num_rows(self) -> int:
        return len(self._places)

    @property
    def fields(self) -> Sequence[str]:
        return list(self._columns)

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        return [self._columns[field][start:stop] for field in fields]

    def place(self, row: int) -> str:
        return self._places[row]

    def class_names(self, field: str) -> Sequence[str] | None:
        find = getattr(self._source, "class_names", None)
        return None if find is None else find(field)


class RowRange(Rows):
    """The rows *start* to *stop* of the table *whole*.

    Fields, and whether they have messages, are the same as in *whole*.
    """

    def __init__(self, whole: Rows, start: int, stop: int) -> None:
        self.path = whole.path
        self.whole = whole
        self.start = start
        self.stop = stop

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def fields(self) -> Sequence[str]:
        return self.whole.fields

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        stop = min(stop, self.num_rows)
        return self.whole.read_range(fields, self.start + start, self.start + stop)

    def place(self, row: int) -> str:
        return self.whole.place(self.start + row)

    def require(self, fields: Sequence[str]) -> None:
        self.whole.require(fields)

    def class_names(self, field: str) -> Sequence[str] | None:
        return self.whole.class_names(field)

    def has_messages(self, field: str) -> bool:
        return self.whole.has_messages(field)


class RecordRows(Rows):
    """The rows of several *files* in memory, as JSON text that is parsed when a row is used.

    *numbers* are the rows of the files that the table has, in its order; all of them unless they are assigned.
    """

    def __init__(self, path: str, files: Sequence[Path]) -> None:
        fields = check_tables(files)
        # Three buffers and not a list of objects: forked workers share them, because no reference count changes.
        texts = bytearray()
        ends = array("q", [0])
        lines = array("q")
        self.file_ends = [0]
        """The number of rows up to the end of each file, after that before the first one."""
        for file in files:
            for record in read_records(file):
                fields.update(dict.fromkeys(record.content))
                texts += record.to_json().encode()
                ends.append(len(texts))
                lines.append(record.line)
            self.file_ends.append(len(lines))
        self.path = path
        self.numbers: Sequence[int] = range(len(lines))
        self._fields = list(fields)
        self._files = list(files)
        self._texts, self._ends, self._lines = texts, ends, lines

    @property
    def num_rows(self) -> int:
        return len(self.numbers)

    @property
    def fields(self) -> Sequence[str]:
        return self._fields

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        columns: Columns = [[] for _ in fields]
        for number in self.numbers[start:stop]:
            row = self._content(number)
            for field, column in zip(fields, columns, strict=True):
                column.append(row.get(field))
        return columns

    def place(self, row: int) -> str:
        number = self.numbers[row]
        file = self._files[bisect_right(self.file_ends, number) - 1]
        return f"{file}:{self._lines[number]}"

    def _content(self, number: int) -> Row:
        text = self._texts[self._ends[number] : self._ends[number + 1]]
        # A row without fields may be written as null.
        return json.loads(text.decode()) or {}


def _names_in_all(fields: Sequence[str]) -> list[str]:
    """List the fields that *fields*, names or templates, use, without repetitions."""
    return list(dict.fromkeys(chain.from_iterable(map(names_in, fields))))


def empty_data(path: str) -> RecipeError:
    hint = "give a file with at least one sample"
    return RecipeError("the data file is empty", where=path, value="0 samples", hint=hint)
