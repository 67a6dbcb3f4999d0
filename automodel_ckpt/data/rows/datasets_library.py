"""The library ``datasets``: which of its options a directory sets, and its tables and streams, with media as bytes."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from automodel_ckpt.data.conversations.messages import without_nulls
from automodel_ckpt.data.rows.files import UNREADABLE
from automodel_ckpt.data.rows.row_files import Lane
from automodel_ckpt.data.rows.rows import Columns, Row, Rows


def has_reading_options(config: Any, kinds: set[str]) -> bool:
    """Whether a directory's README has options for reading its files, which only ``datasets`` supports."""
    not_options = {"name", "version", "data_dir", "data_files", "description"}
    if kinds == {".tsv"}:
        not_options |= {"sep", "delimiter"}
    default = type(config)()
    names = {field.name for field in dataclasses.fields(config)} - not_options
    return any(getattr(config, name) != getattr(default, name) for name in names)


def class_names(feature: Any) -> list[str] | None:
    """The names of a column of ClassLabel, or of lists of it; None for another column."""
    inner = getattr(feature, "feature", feature)
    return list(inner.names) if type(inner).__name__ == "ClassLabel" else None


def with_encoded_media(table: Any, datasets: Any) -> Any:
    """Return *table* with images and audio as the bytes of their files.

    The library would decode them without a limit of their size, and report damaged ones without their location.
    """
    for column, feature in table.features.items():
        if (encoded := _encoded(feature, datasets)) is not feature:
            table = table.cast_column(column, encoded)
    return table


def _encoded(feature: Any, datasets: Any) -> Any:
    """Return a feature of a table with images and audio that are not decoded; *feature* itself if it has none."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.Audio):
        return datasets.Audio(feature.sampling_rate, decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        inner = _encoded(feature.feature, datasets)
        return feature if inner is feature.feature else dataclasses.replace(feature, feature=inner)
    if isinstance(feature, dict):
        fields = {name: _encoded(value, datasets) for name, value in feature.items()}
        return fields if any(fields[name] is not feature[name] for name in fields) else feature
    return feature


@contextmanager
def quiet(datasets: Any) -> Iterator[None]:
    """Hide the progress bars and log lines of ``datasets``: errors are reported by exceptions."""
    # These are settings of the process, so other threads see them, too.
    has_bars = not datasets.are_progress_bars_disabled()
    level = datasets.logging.get_verbosity()
    cards = logging.getLogger("huggingface_hub.repocard")  # warns about a directory's README
    cards_level = cards.level
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    cards.setLevel(logging.ERROR)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        cards.setLevel(cards_level)
        if has_bars:
            datasets.enable_progress_bars()


class TableRows(Rows):
    """The rows of *table*, a data set of ``datasets``, and their location; *source* names them."""

    def __init__(self, source: Any, table: Any) -> None:
        self.source = source
        self.path = source.path
        self.table = table

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def fields(self) -> Sequence[str]:
        return list(self.table.column_names)

    def class_names(self, field: str) -> list[str] | None:
        return class_names(self.table.features[field])

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        try:
            rows = self.table.select_columns(list(dict.fromkeys(fields)))[start:stop]
        except UnicodeDecodeError as error:  # Parquet's reader does not check that text is UTF-8
            raise self.source.unreadable(error) from error
        return [[without_nulls(value) for value in rows[field]] for field in fields]

    def row(self, number: int) -> Row:
        """The fields of one row. Images and audio are ``{"bytes", "path"}``, not decoded."""
        try:
            fields: Row = self.table[number]
            return {name: without_nulls(value) for name, value in fields.items()}
        except (OSError, ValueError) as error:
            value = f"{type(error).__name__}: {error}"
            raise self.unusable(number, "a row cannot be read", value) from error

    def place(self, row: int) -> str:
        split = "" if self.source.split == "train" else f" {self.source.split}"
        return f"{self.path}{split}, row {row}"


class TableStream:
    """The rows of an iterable data set of ``datasets``, as pairs of content and None: their location is unknown.

    With a *lane* (number, count), it has every *count*-th row, beginning with row *number*. All rows are read.
    """

    fields: Sequence[str] = ()

    def __init__(self, source: Any, rows: Any, lane: tuple[int, int] = (0, 1)) -> None:
        self.source = source
        self.rows = rows
        self._lane = lane
        self._row = 0

    def __iter__(self) -> Iterator[tuple[Row, None]]:
        lane = Lane(*self._lane, row=self._row)
        try:
            for row in self.rows:
                is_taken = lane.takes_next()
                self._row = lane.row
                if is_taken:
                    yield without_nulls(row), None
        except (*UNREADABLE, ValueError, RuntimeError) as error:
            if not self.source.is_file:
                raise
            raise self.source.unreadable(error) from error

    def class_names(self, field: str) -> list[str] | None:
        """The names that the data gives to the numbers of a field (ClassLabel); None without such."""
        return class_names((self.rows.features or {}).get(field))

    def take(self, limit: int) -> TableStream:
        """The first *limit* rows."""
        return TableStream(self.source, self.rows.take(limit))

    def lane(self, number: int, count: int) -> TableStream:
        """Every *count*-th row, beginning with row *number*."""
        return TableStream(self.source, copy.deepcopy(self.rows), (number, count))

    def state_dict(self) -> Any:
        state = self.rows.state_dict()
        return state if self._lane == (0, 1) else {"rows": state, "row": self._row}

    def load_state_dict(self, state: Any) -> None:
        if self._lane != (0, 1):
            state, self._row = state["rows"], state["row"]
        self.rows.load_state_dict(state)
