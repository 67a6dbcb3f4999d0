"""``ckpt goodput``: how the time of a run was spent, and which share of it was useful."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.units import counted, exact_time
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.cli.common.arguments import RUN
from automodel_ckpt.cli.common.output import print_document, table
from automodel_ckpt.cli.common.paths import run_with_logs
from automodel_ckpt.errors import printable

if TYPE_CHECKING:
    from automodel_ckpt.logs.goodput import Goodput, Start

# Starts that are listed; ``--json`` has all.
_MAX_LINES = 10
USAGE = f"""
Show how the time of a run was spent, from its first start to its last end: steps, start-up, validation, saves, steps
that were lost, restarts. The goodput is the share of the steps that the run has.

{RUN}
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt goodput``. Raises :class:`CheckpointUnusable` if the run has no record of its time."""
    from automodel_ckpt.logs.goodput import read_goodput

    directory = run_with_logs(Path(arguments.path))
    found = read_goodput(directory)
    return print_document(arguments, _document(found), _lines(directory, found))


def _lines(directory: Path, found: Goodput) -> Iterator[str]:
    from automodel_ckpt.logs.goodput import CATEGORIES

    starts = counted(len(found.starts), "start")
    yield printable(
        f"{directory}: {found.share:.1%} of {exact_time(found.total)} in {starts} was useful"
    )
    rows = []
    for name, title in CATEGORIES.items():
        seconds = found.seconds[name]
        share = seconds / found.total if found.total > 0 else 0.0
        note = ""
        if name == "lost_steps" and found.num_lost_steps:
            note = f"{counted(found.num_lost_steps, 'step')} made again"
        rows.append((f"  {title}", f"{seconds:,.1f} s", f"{share:.1%}", note))
    yield from table(rows, right=(1, 2))
    if len(found.starts) > 1:
        yield "starts"
        yield from _starts(found.starts)


def _starts(starts: Sequence[Start]) -> Iterator[str]:
    """Yield a line for each of the newest starts: when it began, how long it lasted, its steps, and what ended it."""
    if len(starts) > _MAX_LINES:
        yield f"  ... {counted(len(starts) - _MAX_LINES, 'earlier start')}"
    rows = []
    for start in starts[-_MAX_LINES:]:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began))
        steps = "no step"
        if start.last_step > start.first_step:
            steps = f"steps {start.first_step + 1:,} to {start.last_step:,}"
        rows.append((f"  {began}", exact_time(start.duration), steps, start.outcome))
    yield from table(rows, right=(1,))


def _document(found: Goodput) -> ValueDict:
    keys = ("began", "seconds", "first_step", "last_step", "outcome")
    starts = [{key: getattr(start, key) for key in keys} for start in found.starts]
    return {
        "goodput": found.share,
        "total_seconds": found.total,
        "seconds": found.seconds,
        "steps": found.num_steps,
        "lost_steps": found.num_lost_steps,
        "starts": starts,
    }
