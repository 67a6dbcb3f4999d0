"""Small files in a run directory: notes, which are JSON written in one rename, and the timeline. None is trusted.

Two of them are about checkpoints, which never change after their publication: the losses of validations that ran later,
because a signal interrupted them before, and the results of ``ckpt verify`` and of the verification at starts, for
``ckpt ls``. An entry belongs to one manifest: it is ignored if another checkpoint has the name. The timeline
(``timeline.jsonl`` and ``.timeline.json``) is how a run spent its time. Imports no torch.

``.remote-start.json`` has the step to which a run went back. A start writes it before it trains, and the uploading
process removes it when it has marked the later checkpoints in the store as superseded. So a run that went back while
its store could not be reached, and was started again, neither fetches an abandoned checkpoint nor leaves it unmarked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import open_regular, parse_json, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.commit import stamp
from automodel_ckpt.errors import CheckpointUnusable

log = logging.getLogger("automodel_ckpt")

MAX_BYTES = 1 << 20
"""The limit by default: JSON takes many times its size once parsed."""
Damaged = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""What reading fields of a note that another program changed may raise."""
_MAX_BYTES_OF_ALL = 1 << 22
"""The limit of a note about all checkpoints of a run."""
_MAX_TEXT = 100


def read_note(directory: Path, name: str, limit: int = MAX_BYTES) -> ValueDict:
    """Return the mapping in the file *name* of *directory*; empty if the file is missing, damaged or too large."""
    try:
        found = parse_json(read_safely(directory, name, limit=limit))
    except (OSError, ValueError, CheckpointUnusable):
        return {}
    return found if isinstance(found, dict) else {}


def write_note(path: Path, content: Values) -> None:
    """Replace a note. Raises OSError."""
    replace_file(path, json.dumps(content).encode() + b"\n")


def forget_memory(run: Path) -> None:
    """Make the memory checkpoints of *run* unusable, because the run continues without them. Called by rank 0."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(run / layout.MEMORY)
        log.info(
            "checkpoints in memory of earlier starts are not used: checkpoint.memory is not set"
        )


# ---------------------------------------------------------------- later validations


def note_losses(checkpoint: Path, digest: str, losses: Values) -> None:
    """Store the *losses* of a later validation of a checkpoint; *digest* is its manifest's. Raises OSError."""
    run = checkpoint.parent
    # Entries of removed checkpoints are dropped: a long run would reach the limit.
    entries = {}
    for name, entry in read_note(run, layout.LATE_VALIDATIONS, _MAX_BYTES_OF_ALL).items():
        if layout.parse_checkpoint_name(name) and (run / name).is_dir():
            entries[name] = entry
    entries[checkpoint.name] = {"manifest": digest, "losses": dict(losses)}
    write_note(run / layout.LATE_VALIDATIONS, entries)


def recall_losses(checkpoint: Path, digest: str) -> ValueDict:
    """Return the stored losses of a checkpoint, with a manifest that has *digest*; empty if there are none."""
    notes = read_note(checkpoint.parent, layout.LATE_VALIDATIONS, _MAX_BYTES_OF_ALL)
    with contextlib.suppress(*Damaged):
        entry = notes[checkpoint.name]
        if entry["manifest"] == digest:
            return {key: value for key, value in entry["losses"].items() if _is_loss(value)}
    return {}


def _is_loss(value: object) -> bool:
    """Whether a value can be a loss that a run wrote: null, a 64-bit number, or text for a value that is not finite."""
    # JSON integers can have thousands of digits, which float() cannot convert.
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return value is None or isinstance(value, float)


# ---------------------------------------------------------------- verifications


class Verification(NamedTuple):
    """When a checkpoint was verified (seconds since 1970), and whether it was intact."""

    time: float
    ok: bool


def recall_verifications(run: Path) -> dict[str, Verification]:
    """Return the results for the checkpoints in *run* with the manifest that they had then, by their names.

    Damage is recorded until a later verification finds the checkpoint intact.
    """
    found = {}
    for name, entry in read_note(run, layout.VERIFIED, _MAX_BYTES_OF_ALL).items():
        with contextlib.suppress(OSError, *Damaged):
            is_same = [int(number) for number in entry["stamp"]] == list(stamp(run / name))
            if layout.is_checkpoint(name) and is_same:
                found[name] = Verification(float(entry["time"]), entry["ok"] is True)
    return found


def note_verifications(run: Path, results: Mapping[str, bool]) -> None:
    """Store whether each checkpoint was intact. Does nothing if the directory cannot be written."""
    now = time.time()
    current = recall_verifications(run) | {n: Verification(now, ok) for n, ok in results.items()}
    notes = {}
    for name, each in current.items():
        with contextlib.suppress(OSError):
            current_stamp = list(stamp(run / name))
            notes[name] = {"time": each.time, "ok": each.ok, "stamp": current_stamp}
    with contextlib.suppress(OSError):
        write_note(run / layout.VERIFIED, notes)


# ---------------------------------------------------------------- timeline


STARTUP, STEPS, DATA, SAVES, VALIDATION, OTHER = (
    "startup",
    "steps",
    "data",
    "saves",
    "validation",
    "other",
)
PHASES = (STARTUP, STEPS, DATA, SAVES, VALIDATION, OTHER)
"""Start-up until the first step; steps; training waits for data, or for a save; validation; what remains."""
DONE, STOPPED, FAILED, KILLED = "done", "stopped", "failed", "killed"
START, END = "start", "end"
STRAGGLER = "straggler"
"""The event of a line of ``training.jsonl`` about a rank that is slower than the others."""
FORWARD, ARRIVAL = "forward", "arrival"
"""Its part: in forward passes, or in what precedes a step."""
SLOT_BYTES = 1024
"""The state is written alternately to two slots of a file, so that a kill damages at most one."""
_MAX_TIMELINE_BYTES = 64 * 2**20
_MAX_SECONDS, _MAX_STEP = 1e12, 2**53


def read_timeline(directory: Path) -> Iterator[ValueDict]:
    """Yield the valid lines of a run's timeline, in their order: beginnings and ends of starts. Raises OSError."""
    try:
        data = _read(directory / layout.TIMELINE_LOG)
    except (FileNotFoundError, NotADirectoryError):
        return
    for line in data.splitlines():
        record = _parsed(line)
        if record is not None:
            yield record


def read_state(directory: Path) -> ValueDict | None:
    """Return the newest state of the last start, as the line of its end, or None when it cannot be read."""
    try:
        data = _read(directory / layout.TIMELINE_STATE)
    except OSError:
        return None
    slots = [_parsed(data[:SLOT_BYTES]), _parsed(data[SLOT_BYTES : 2 * SLOT_BYTES])]
    found = [slot for slot in slots if slot is not None and slot["event"] == END]
    return max(found, key=lambda state: state["time"], default=None)


def _read(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(_MAX_TIMELINE_BYTES)


def _parsed(line: bytes) -> ValueDict | None:
    """Return a line as a record. All fields have the right types and are in range. Returns None for any other text."""
    try:
        record = parse_json(line)
        values = [record["time"]]
        counts = [record["step"], record.get("num_steps", 0)]
        is_known = record["event"] in (START, END) and isinstance(record["start"], str)
        if record["event"] == END:
            values += [record["logged"], *(record["seconds"][phase] for phase in PHASES)]
    except Damaged:
        return None
    are_counts = all(type(each) is int and 0 <= each <= _MAX_STEP for each in counts)
    return record if is_known and are_counts and all(map(_is_number, values)) else None


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Not math.isfinite(), which fails for the largest integers. Comparisons with NaN are false.
    return 0 <= value <= _MAX_SECONDS


# ---------------------------------------------------------------- the step that a run went back to


GONE_BACK = ".remote-start.json"


@dataclass(frozen=True, slots=True)
class GoneBack:
    """The record: the *step*, the *time* of the first start in seconds since 1970, and the *tokens* of all starts."""

    step: int
    time: float
    tokens: tuple[str, ...]

    @classmethod
    def read(cls, root: Path) -> GoneBack | None:
        """Read the record of the run in *root*; None when there is none, or if it is damaged."""
        found = read_note(root, GONE_BACK)
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


def note_gone_back(root: Path, step: int, token: str) -> int:
    """Record that the start *token* goes back to *step*; return the lowest step since the store was marked."""
    before = GoneBack.read(root)
    record = GoneBack(step, time.time(), (token,))
    if before is not None:
        record = GoneBack(min(before.step, step), before.time, (*before.tokens, token))
    write_note(root / GONE_BACK, asdict(record))
    return record.step


def forget_gone_back(root: Path) -> None:
    """Remove the record: the checkpoints in the store are marked."""
    (root / GONE_BACK).unlink(missing_ok=True)
