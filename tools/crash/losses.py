"""What failures cost: the steps that a training repeats, and the time until it is where it had been."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tools.crash.trainer import Mark


class Loss(NamedTuple):
    """What one failure lost: completed steps that were repeated, and seconds until the next new step."""

    steps: int
    seconds: float


class Losses:
    """The losses of a campaign, by how the run is saved (*way*) and by something else, which *column* names."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._found: dict[tuple[str, str], list[Loss]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        """The number of failures."""
        return sum(len(found) for found in self._found.values())

    def add_all(self, other: Losses) -> None:
        """Add the losses of another process of the campaign."""
        for key, found in other._found.items():
            self._found.setdefault(key, []).extend(found)

    def add(self, way: str, name: str, loss: Loss) -> None:
        self._found.setdefault((way, name), []).append(loss)

    def notes(self) -> dict[str, dict[str, float]]:
        """For the record of a campaign."""
        found = {}
        for (way, name), losses in sorted(self._found.items()):
            steps = [loss.steps for loss in losses]
            found[f"{way}: {name}"] = {
                "failures": len(losses),
                "lost steps, most": max(steps),
                "lost steps, mean": round(sum(steps) / len(steps), 2),
                "seconds to the next new step, median": round(
                    median(loss.seconds for loss in losses), 2
                ),
            }
        return found

    def table(self) -> str:
        """A table in Markdown: a row for each way and name, and one for all failures of each way."""
        lines = [
            f"| saved | {self._column} | failures | lost steps, most (mean) | s, median |",
            "|---|---|---:|---:|---:|",
        ]
        by_way: dict[str, dict[str, list[Loss]]] = {}
        for (way, name), found in sorted(self._found.items()):
            by_way.setdefault(way, {})[name] = found
        for way, by_name in by_way.items():
            for name, found in by_name.items():
                lines.append(f"| {way} | {name} | {_cells(found)} |")
            everything = [loss for found in by_name.values() for loss in found]
            lines.append(f"| **{way}** | **all** | {_cells(everything)} |")
        return "\n".join(lines)


def _cells(found: Sequence[Loss]) -> str:
    steps = [loss.steps for loss in found]
    seconds = median(loss.seconds for loss in found)
    return f"{len(found)} | {max(steps)} ({sum(steps) / len(steps):.2f}) | {seconds:.1f}"


def completed(marks: Sequence[Mark]) -> int:
    """The last step that a rank with these *marks* has completed: it waits for the data of the next one."""
    return max((mark.step for mark in marks if mark.name == "data"), default=0)


def has_completed(marks: Sequence[Mark], step: int, since: float = 0.0) -> bool:
    """Whether *step* or a later one was completed after the instant *since*."""
    return any(mark.name == "data" and mark.step >= step and mark.seconds > since for mark in marks)


def resumed(marks: Sequence[Mark], instant: float, before: int) -> int:
    """The step that a run continued from after a failure at *instant*; *before* if it did not start again."""
    return min([before, *(mark.step for mark in marks if mark.seconds > instant)])


def parent(process: int) -> int:
    """The id of the parent of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])
