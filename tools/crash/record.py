"""What a campaign found: counts, violations with what reproduces them, a JSON file, and an exit code."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY = Path("runs/crash")
_SHOWN = 20
_TELL_SECONDS = 60


@dataclass
class Record:
    """One campaign. *outcomes* counts what happened to how many points; *failures* are broken promises."""

    campaign: str
    arguments: dict[str, Any]
    started: float = field(default_factory=time.time)
    points: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    marked: Counter[str] = field(default_factory=Counter)
    """The failures at each marked point that must have one."""
    notes: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    """The results in Markdown, of campaigns that measure costs."""
    _told: float = field(default_factory=time.time)

    def add(self, outcome: str, violations: Sequence[str] = (), **point: Any) -> None:
        """One point and what it came to; *point* is what one needs to run it again."""
        self.points += 1
        self.outcomes[outcome] += 1
        if violations:
            self.failures.append({"violations": list(violations), "outcome": outcome, **point})
            if len(self.failures) <= _SHOWN:
                print(f"VIOLATION {point}: {'; '.join(violations)}", file=sys.stderr, flush=True)

        if time.time() - self._told > _TELL_SECONDS:
            self._told = time.time()
            print(self.summary, file=sys.stderr, flush=True)

    def require(self, points: Iterable[str]) -> None:
        """Note the marked points for which :meth:`count_at` has to be called."""
        self.marked.update(dict.fromkeys(points, 0))

    def count_at(self, point: str) -> None:
        """Count a failure at a marked point."""
        self.marked[point] += 1

    def note_missing(self) -> None:
        """Report the marked points without a failure: a campaign with a time limit may not reach all."""
        if missing := [point for point, count in self.marked.items() if not count]:
            self.notes["no failure at"] = missing
            print(f"no failure in the time at: {', '.join(missing)}", flush=True)

    def add_all(self, other: Record) -> None:
        """Add what another process of the campaign has found."""
        self.points += other.points
        self.outcomes.update(other.outcomes)
        self.failures += other.failures
        self.marked.update(other.marked)

    @property
    def summary(self) -> str:
        counted = ", ".join(
            f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())
        )
        seconds = time.time() - self.started
        return f"{self.campaign}: {self.points} points, {len(self.failures)} violations ({counted}), {seconds:.0f} s"

    def finish(self) -> int:
        """Write the record, print the summary; the exit code."""
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        path = DIRECTORY / (re.sub(r"\W+", "-", self.campaign) + ".json")
        document = {
            "campaign": self.campaign,
            "arguments": self.arguments,
            "summary": self.summary,
            "points": self.points,
            "seconds": time.time() - self.started,
            "started": self.started,
            "outcomes": dict(self.outcomes),
            "failures": self.failures,
            "marked points": dict(self.marked),
            "notes": self.notes,
            "machine": platform.platform(),
        }
        path.write_text(json.dumps(document, indent=1, default=str) + "\n")
        if self.table:
            print(self.table)
        print(self.summary, flush=True)
        return 1 if self.failures or not self.points else 0
