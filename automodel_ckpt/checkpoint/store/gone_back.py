"""A record of the step to which a run went back, until the later checkpoints in its store are marked as superseded.

A start writes the record ``.remote-start.json`` into the run directory before it trains, and the uploading process
removes it when it has marked the later checkpoints as superseded. So a run that went back while its store could not be
reached, and was started again, neither fetches an abandoned checkpoint nor leaves it unmarked.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note

FILE = ".remote-start.json"


@dataclass(frozen=True, slots=True)
class GoneBack:
    """The record: the *step*, the *time* of the first start in seconds since 1970, and the *tokens* of all starts."""

    step: int
    time: float
    tokens: tuple[str, ...]

    @classmethod
    def read(cls, root: Path) -> GoneBack | None:
        """Read the record of the run in *root*; None when there is none, or if it is damaged."""
        found = read_note(root, FILE)
        try:
            tokens = tuple(str(token) for token in found["tokens"])
            return cls(int(found["step"]), float(found["time"]), tokens)
        except Damaged:
            return None

    def is_outdated(self, owner: Values) -> bool:
        """Whether another run took over the store since: *owner* is the content of its ``run.json``."""
        try:
            return str(owner["start"]) not in self.tokens and float(owner["time"]) > self.time
        except (KeyError, TypeError, ValueError):
            return False


def note(root: Path, step: int, token: str) -> int:
    """Record that the start *token* goes back to *step*; return the lowest step since the store was marked."""
    before = GoneBack.read(root)
    record = GoneBack(step, time.time(), (token,))
    if before is not None:
        record = GoneBack(min(before.step, step), before.time, (*before.tokens, token))
    write_note(root / FILE, asdict(record))
    return record.step


def forget(root: Path) -> None:
    """Remove the record: the checkpoints in the store are marked."""
    (root / FILE).unlink(missing_ok=True)
