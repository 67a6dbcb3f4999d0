"""The figures of one part as a JSON file, which is complete after each measurement."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUNNING = "running"
"""The value of ``ended`` in the file of a part that has not ended, or whose process was killed."""

NOT_RUN = "not run"
"""The beginning of the reason of a measurement that was not started."""


class Results:
    """The figures of one part, by the name of the measurement.

    The file is replaced after each change by a rename, so that whoever stops the process finds complete JSON.
    """

    def __init__(
        self, path: Path, part: str, machine: Mapping[str, Any], *, is_dry_run: bool
    ) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "part": part,
            "is_dry_run": is_dry_run,
            "machine": dict(machine),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": 0.0,
            "ended": RUNNING,
            "figures": {},
            "failed": {},
        }
        self._started = time.monotonic()
        self._write()

    @property
    def figures(self) -> dict[str, dict[str, Any]]:
        """The figures of each measurement so far."""
        found: dict[str, dict[str, Any]] = self.content["figures"]
        return found

    @property
    def failed(self) -> dict[str, str]:
        """What failed, by measurement: a reason, and the end of its output."""
        found: dict[str, str] = self.content["failed"]
        return found

    def add(self, name: str, figures: Mapping[str, Any]) -> None:
        """Write the figures of a measurement."""
        self.figures[name] = dict(figures)
        self._write()

    def fail(self, name: str, reason: str) -> None:
        """Write that a measurement has no figures, or not all."""
        self.failed[name] = reason
        self._write()

    def end(self, how: str) -> None:
        """Write how the part ended: ``done``, or why it was stopped."""
        self.content["ended"] = how
        self._write()

    def _write(self) -> None:
        seconds = time.monotonic() - self._started
        self.content["seconds"] = round(seconds, 1)
        text = json.dumps(finite(self.content), indent=1) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete, because a reader may open it at any time.
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(text)
        os.replace(partial, self.path)


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have (NaN, infinities) by None, at any depth."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_all(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the files of all parts in a directory, by part. Files that are not of this tool are ignored."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(content, dict) and {"part", "figures"} <= content.keys():
            found[content["part"]] = content
    return found
