"""What failures cost a training on two nodes with checkpoints in memory, and whether it ends as if there were none.

The nodes are network namespaces of this machine, each with its own /dev/shm (:mod:`tests.support.servers.nodes`). A
run is hit
again and again (:mod:`tools.crash.strikes`): a rank is killed, all ranks of a node, a writer, a process that sends
copies to the other node, a launcher, or a node is lost with its memory, with or without its connections being reset.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.support.servers.networks import NoNamespacesError
from tests.support.servers.nodes import Node, begun_nodes
from tools.crash import signals
from tools.crash.launched import ALL_RANKS, NODE, NODE_SILENTLY, Launched, OnNodes
from tools.crash.points import LAUNCHER, RANK, RESCUE, RESTART, SAVE, SENDER, WRITER, points_in
from tools.crash.record import Record
from tools.crash.strikes import MAX_LOST, Campaign, Result, Way, in_processes, words_of

_TARGETS = (RANK, ALL_RANKS, LAUNCHER, NODE, NODE_SILENTLY)
_IN_MEMORY = {"checkpoint.memory.every_steps": 1, "checkpoint.memory.replicas": 1}
MEMORY = Way(
    "memory, 1 replica",
    (*_TARGETS, WRITER, SENDER),
    _IN_MEMORY,
    points_in(SAVE, RESTART, nodes=True),
    MAX_LOST,
)
RESCUED = Way(
    "memory, 1 replica, copied to disk",
    (RANK, ALL_RANKS, NODE),
    _IN_MEMORY,
    points_in(RESCUE, nodes=True),
    MAX_LOST,
    restarts=0,
)
DISK = Way("disk", _TARGETS)
WAYS = (MEMORY, MEMORY, RESCUED, MEMORY, DISK)
"""What the runs use in turn."""
STEPS = 30
PER_NODE = 2
ADDRESSES = ("10.77.44.1", "10.77.44.2")


def unsupported() -> str | None:
    """Why the campaign cannot run here; None if it can."""
    try:
        with begun_nodes(ADDRESSES[:1]):
            return None
    except (NoNamespacesError, AssertionError) as error:
        return str(error)


def run(
    *,
    points_wanted: int,
    seed: int,
    seconds: float,
    base: Path | None = None,
    ways: Sequence[Way] = WAYS,
    per_node: int = PER_NODE,
    steps: int = STEPS,
    processes: int = 1,
    launched: type[OnNodes] = OnNodes,
) -> Record:
    """At least *points_wanted* failures, unless *seconds* pass before, in runs of each of *ways* in turn.

    *launched* starts a run on the nodes.
    """
    signals.import_what_ranks_need()

    def work(number: int) -> Result:
        record = Record("goodput on two nodes", {"points": points_wanted, "seed": seed})
        result, chance = Result(record), random.Random(seed + 1000 * number)
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
            nodes = stack.enter_context(begun_nodes(ADDRESSES))
            recipe = directory / "recipe.yaml"
            recipe.write_text(signals.RECIPE)
            start = partial(_start, launched, directory, nodes, recipe, per_node, steps)
            campaign = Campaign(directory, ways, start, result, chance, steps=steps)
            campaign.run_all(-(-points_wanted // processes), seconds)
        return result

    return in_processes(processes, work).finished()


def _start(
    launched: type[OnNodes],
    base: Path,
    nodes: Sequence[Node],
    recipe: Path,
    per_node: int,
    steps: int,
    name: str,
    way: Way,
) -> Launched:
    words = words_of(way, recipe, base / name, steps, launched.keys(base, name))
    return launched(nodes, base, name, words, per_node)
