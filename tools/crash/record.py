"""What a campaign found: counts, violations with what reproduces them, a JSON file, and an exit code."""

import json
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY = Path("runs/crash")
_SHOWN = 20
_REPORT_SECONDS = 60


@dataclass
class Record:
    """One campaign. *outcomes* counts what happened to how many points; *failures* are broken promises."""

    campaign: str
    arguments: dict[str, Any]
    started: float = field(default_factory=time.time)
    points: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    _reported: float = field(default_factory=time.time)

    @property
    def goes_on(self) -> bool:
        """Whether neither the wanted points nor the seconds have been reached."""
        seconds = time.time() - self.started
        return bool(self.points < self.arguments["points"] and seconds < self.arguments["seconds"])

    def add(self, outcome: str, violations: Sequence[str] = (), **point: Any) -> None:
        """One point and what it came to; *point* is what one needs to run it again."""
        self.points += 1
        self.outcomes[outcome] += 1
        if violations:
            self.failures.append({"violations": list(violations), "outcome": outcome, **point})
            if len(self.failures) <= _SHOWN:
                print(f"VIOLATION {point}: {'; '.join(violations)}", file=sys.stderr, flush=True)
        if time.time() - self._reported > _REPORT_SECONDS:
            self._reported = time.time()
            print(self.summary, file=sys.stderr, flush=True)

    @property
    def summary(self) -> str:
        counted = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        seconds = time.time() - self.started
        return f"{self.campaign}: {self.points} points, {len(self.failures)} violations ({counted}), {seconds:.0f} s"

    def finish(self) -> int:
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
            "notes": self.notes,
            "machine": platform.platform(),
        }
        path.write_text(json.dumps(document, indent=1, default=str) + "\n")
        print(self.summary, flush=True)
        return 1 if self.failures or not self.points else 0
