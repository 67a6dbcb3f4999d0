"""The rows of an iterable data set of the library ``datasets``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from automodel_ckpt.data.conversations.messages import without_nulls
from automodel_ckpt.data.rows.datasets_library import class_names
from automodel_ckpt.data.rows.records import Lane


class TableStream:
    """The rows of an iterable data set of ``datasets``, as pairs of content and None: their location is unknown."""

    fields: Sequence[str] = ()

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[dict[str, Any], None]]:
        for row in self.rows:
            yield without_nulls(row), None

    def class_names(self, field: str) -> list[str] | None:
        """The names that the data gives to the numbers of a field (ClassLabel); None without such."""
        return class_names((self.rows.features or {}).get(field))

    def take(self, limit: int) -> TableStream:
        """The first *limit* rows."""
        return TableStream(self.rows.take(limit))

    def lane(self, number: int, count: int) -> TableLane:
        """Every *count*-th row, beginning with row *number*. All rows are read."""
        return TableLane(copy.deepcopy(self.rows), number, count)

    def state_dict(self) -> Any:
        return self.rows.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.rows.load_state_dict(state)


class TableLane(TableStream):
    """Every *count*-th row of an iterable data set of ``datasets``, beginning with row *number*."""

    def __init__(self, rows: Any, number: int, count: int) -> None:
        super().__init__(rows)
        self._lane = (number, count)
        self._row = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], None]]:
        lane = Lane(*self._lane, row=self._row)
        for content, place in super().__iter__():
            is_taken = lane.takes_next()
            self._row = lane.row
            if is_taken:
                yield content, place

    def state_dict(self) -> Any:
        return {"rows": self.rows.state_dict(), "row": self._row}

    def load_state_dict(self, state: Any) -> None:
        self.rows.load_state_dict(state["rows"])
        self._row = state["row"]
