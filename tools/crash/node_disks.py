"""Failures of a training on two nodes that share no storage: checkpoints are in a store, and lost with a node's disk.

The nodes are those of :mod:`tools.crash.node_failures`, and their /dev/shm is their disk. The store is a directory
(``file://``). It ends as the directory of a run whose last checkpoint and logs are compared with an undisturbed one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.remote.run import OWNER
from tests.support.servers.nodes import SHARED_MEMORY
from tools.crash import inspect, node_failures
from tools.crash.launched import ALL_RANKS, ENVIRONMENT, NODE, NODE_SILENTLY, OnNodes, enter_node
from tools.crash.points import LAUNCHER, RANK, WRITER
from tools.crash.record import Record
from tools.crash.strikes import Way
from tools.crash.trainer import Trainer

_TARGETS = (RANK, ALL_RANKS, LAUNCHER, NODE, NODE_SILENTLY)
SYNCHRONOUS = Way("disks of nodes and a store", _TARGETS)
ASYNCHRONOUS = Way(
    "disks of nodes and a store, asynchronous", (*_TARGETS, WRITER), {"checkpoint.is_async": "true"}
)
WAYS = (SYNCHRONOUS, ASYNCHRONOUS)
_SCRATCH = f"{SHARED_MEMORY}/scratch"
_ENVIRONMENT = {**ENVIRONMENT, "AUTOMODEL_CKPT_UPLOAD_NICENESS": "0"}
_UPLOADS_END_SECONDS = 90.0
"""Uploading processes of starts that failed go on for a minute."""


class OnDisks(OnNodes):
    """A run on several nodes, whose store is the directory of its name in *base*."""

    @staticmethod
    def keys(base: Path, name: str) -> Mapping[str, Any]:
        return {
            "checkpoint.checkpoint_dir": f"file://{base / name}",
            "checkpoint.scratch_dir": _SCRATCH,
        }

    def launcher(self, number: int, directory: Path) -> Trainer:
        enter = partial(enter_node, self.nodes[number])
        return Trainer(self.words, directory, _ENVIRONMENT, enter=enter, marks_at=self.marks_at)

    def supervise(self) -> bool:
        has_ended = super().supervise()
        if has_ended:
            make_run_directory(self.base / self.name)
        return has_ended

    def left(self) -> list[str]:
        """What is still there after the end: processes, and objects that belong to no checkpoint."""
        numbers = range(self.num_nodes)
        end = time.monotonic() + _UPLOADS_END_SECONDS
        while any(self.processes(number) for number in numbers) and time.monotonic() < end:
            time.sleep(0.1)
        found = [f"process {pid}" for number in numbers for pid in self.processes(number)]
        found += inspect.damage(self.base / self.name)
        entries = inspect.leftovers(self.base / self.name, running=False)
        return found + [text for text in entries if not text.endswith(".jsonl")]


def make_run_directory(store: Path) -> None:
    """Turn the objects of a store into the links of a run directory, once."""
    for pointer in layout.POINTERS:
        path = store / pointer
        if path.is_file() and not path.is_symlink():
            name = path.read_text().partition("\n")[0]
            path.unlink()
            os.symlink(name, path)
    (store / OWNER).unlink(missing_ok=True)


def run(*, points_wanted: int, seed: int, seconds: float, processes: int = 1) -> Record:
    """At least *points_wanted* failures, unless *seconds* pass before."""
    record = node_failures.run(
        points_wanted=points_wanted,
        seed=seed,
        seconds=seconds,
        ways=WAYS,
        processes=processes,
        launched=OnDisks,
    )
    record.campaign = "disks of two nodes"
    return record
