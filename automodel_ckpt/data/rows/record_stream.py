"""The rows of several files as a stream that can continue at any row."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.data.rows.records import BEGINNING, Lane, Mark
from automodel_ckpt.data.rows.row_files import FIRST_ROWS, check_tables, header, read_lane


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
