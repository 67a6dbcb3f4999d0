"""What a failure costs a training with checkpoints in memory, and whether the run ends as if there had been none.

A run of two ranks is hit again and again (:mod:`tools.crash.strikes`). For comparison, other runs have no checkpoints
in memory, and others are a plain script with PyTorch's DCP under torchrun (:mod:`tools.torchrun_dcp`), with the same
kinds of failures.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tools.crash import signals, torchrun
from tools.crash.launched import ALL_RANKS, Launched, OfTorchrun, memory_at
from tools.crash.points import LAUNCHER, RANK, RESCUE, RESTART, SAVE, WRITER, points_in
from tools.crash.record import Record
from tools.crash.strikes import MAX_LOST, Campaign, Result, Way, in_processes, words_of

_TARGETS = (RANK, ALL_RANKS, LAUNCHER)
_IN_MEMORY = {"checkpoint.memory.every_steps": 1}
MEMORY = Way(
    "memory",
    (*_TARGETS, WRITER),
    _IN_MEMORY,
    points_in(SAVE, RESTART, nodes=False),
    MAX_LOST,
)
RESCUED = Way(
    "memory, copied to disk",
    (RANK, ALL_RANKS),
    _IN_MEMORY,
    points_in(RESCUE, nodes=False),
    MAX_LOST,
    restarts=0,
)
DISK = Way("disk", _TARGETS)
# If torchrun is killed, its ranks go on: a cluster would have to end them first.
DCP = Way("torchrun + DCP", (RANK, ALL_RANKS), is_ours=False)
DCP_ASYNC = Way("torchrun + DCP, async_save", (RANK, ALL_RANKS), is_ours=False)
WAYS = (MEMORY, DISK, MEMORY, DCP, RESCUED, DCP_ASYNC)
"""What the runs use in turn."""
STEPS = 30


def run(
    *,
    points_wanted: int,
    seed: int,
    seconds: float,
    base: Path | None = None,
    ways: Sequence[Way] = WAYS,
    processes: int = 1,
) -> Record:
    """At least *points_wanted* failures, unless *seconds* pass before, in runs of each of *ways* in turn."""
    signals.import_what_ranks_need()

    def work(number: int) -> Result:
        record = Record("goodput", {"points": points_wanted, "seed": seed})
        result, chance = Result(record), random.Random(seed + 1000 * number)
        with tempfile.TemporaryDirectory(dir=base) as name:
            directory = Path(name)
            recipe = directory / "recipe.yaml"
            recipe.write_text(signals.RECIPE)
            start = partial(_start, directory, recipe)
            campaign = Campaign(directory, ways, start, result, chance, steps=STEPS)
            campaign.run_all(-(-points_wanted // processes), seconds)
        return result

    return in_processes(processes, work).finished()


def _start(base: Path, recipe: Path, name: str, way: Way) -> Launched:
    run = base / name
    if not way.is_ours:
        is_async = way == DCP_ASYNC
        words = torchrun.words(run, steps=STEPS, restarts=way.restarts, is_async=is_async)
        return OfTorchrun(base, name, words)
    keys = {"checkpoint.memory.directory": memory_at(base, name)} if way.keys else {}
    words = ["--nproc-per-node=2", *words_of(way, recipe, run, STEPS, keys)]
    return Launched(base, name, words)
