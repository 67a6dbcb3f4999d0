"""The rows of several files in memory."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.data.rows.row_files import check_tables, header, read_records


class RecordTable:
    """The rows of several files in memory, as JSON text that is parsed when a row is used.

    *fields* are all fields that occur in a row.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        check_tables(files)
        fields: dict[str, None] = {}
        # Three buffers and not a list of objects: forked workers share them, because no reference count changes.
        texts = bytearray()
        ends = array("q", [0])
        lines = array("q")
        file_ends: list[int] = []
        for file in files:
            fields.update(dict.fromkeys(header(file) or ()))
            for record in read_records(file):
                fields.update(dict.fromkeys(record.content))
                texts += record.to_json().encode()
                ends.append(len(texts))
                lines.append(record.line)
            file_ends.append(len(lines))
        self.fields = list(fields)
        self._files = list(files)
        self._file_ends = file_ends
        self._texts = texts
        self._ends = ends
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, number: int) -> dict[str, Any]:
        """Return the fields of a row."""
        text = self._texts[self._ends[number] : self._ends[number + 1]]
        # A row without fields may be written as null.
        return json.loads(text.decode()) or {}

    def place(self, number: int) -> str:
        """Return the file and line of a row."""
        file = self._files[bisect_right(self._file_ends, number)]
        return f"{file}:{self._lines[number]}"
