"""Runs that are started again until they are done: on this machine, on several nodes of it, or of torchrun."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.servers.nodes import Node
from tools.crash import endurance, inspect, losses, points
from tools.crash.torchrun import Torchrun
from tools.crash.trainer import Mark, Trainer

PORT = 29400
NODE, NODE_SILENTLY = points.NODE, "a node, silently"
ALL_RANKS = "all ranks of a node"
_GONE_SECONDS = 5.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Launched:
    """A run of *words* on this machine, with its files in *base*. Use it as a context.

    A launcher that fails, or is killed, is started again on its node with the same command, as the scheduler of a
    cluster does.
    """

    num_nodes = 1

    def __init__(self, base: Path, name: str, words: Sequence[str]) -> None:
        self.base, self.name, self.words = base, name, words
        self.marks_at = base / f"{name}-marks"
        self.marks_at.mkdir()
        memory_at(base, name).mkdir()
        self.launchers: list[Trainer] = []
        self.ended: list[tuple[int, int]] = []
        """(node, exit code) of each launcher that has ended."""
        self._started: list[Trainer] = []

    def __enter__(self) -> Launched:
        self.launchers = [self._start(number) for number in range(self.num_nodes)]
        return self

    def _start(self, number: int) -> Trainer:
        directory = self.base / f"{self.name}-start-{len(self._started) + 1}"
        trainer = self.launcher(number, directory)
        self._started.append(trainer)
        return trainer.__enter__()

    def launcher(self, number: int, directory: Path) -> Trainer:
        """The command of a node, with its output in *directory*."""
        return Trainer(
            self.words, directory, ENVIRONMENT, enter=points.install, marks_at=self.marks_at
        )

    def __exit__(self, *error: object) -> None:
        for launcher in self.launchers:
            launcher.__exit__(*error)
        for number in range(self.num_nodes):
            kill(self.processes(number))

    def supervise(self) -> bool:
        """Start what has failed again. Returns whether all launchers have ended with code 0."""
        codes = []
        for number, launcher in enumerate(self.launchers):
            had_ended = launcher.code is not None
            launcher.wait(0)
            codes.append(launcher.code)
            if launcher.code is not None and not had_ended:
                self.ended.append((number, launcher.code))
        if codes == [0] * len(codes):
            return True
        if any(code not in (None, 0) for code in codes):
            # A launcher that is done is started again, too: the others would wait for its node.
            for number, code in enumerate(codes):
                if code is not None:
                    self.launchers[number] = self._start(number)
        return False

    def marks(self) -> list[Mark]:
        """What rank 0 has noted so far, on whichever node it was."""
        return self.launchers[0].marks(0)

    # ---------------------------------------------------------------- failures

    def hit(self, target: str, number: int, chance: random.Random) -> bool:
        """Kill *target* on the node *number*; returns False if there is none."""
        ranks = list(self.launchers[number].ranks().values())
        if target == points.LAUNCHER:
            found = [self.launchers[number].pid]
        elif target == ALL_RANKS:
            found = ranks
        else:
            of_kind = ranks if target == points.RANK else self._children(number, target)
            found = [chance.choice(of_kind)] if of_kind else []
        return kill(found)

    def _children(self, number: int, kind: str) -> list[int]:
        """The processes of a *kind* that the ranks of a node have started."""
        ranks = self.launchers[number].ranks().values()
        of_kind = points.MODULES[kind]
        return [
            process
            for process in self.processes(number)
            if losses.parent(process) in ranks and of_kind in command_of(process)
        ]

    # ---------------------------------------------------------------- what is there

    def processes(self, number: int) -> list[int]:
        """The processes on a node."""
        return [pid for each in self._started for pid in endurance.members(each.pid)]

    def memory(self, number: int) -> Path:
        """The directory with the memory checkpoints of a node."""
        return memory_at(self.base, self.name)

    def left(self) -> list[str]:
        """What is still there after the end: processes and memory of all nodes, and files."""
        end = time.monotonic() + _GONE_SECONDS
        numbers = range(self.num_nodes)
        while any(self.processes(number) for number in numbers) and time.monotonic() < end:
            time.sleep(0.01)
        found = []
        for number in numbers:
            for process in self.processes(number):
                found.append(f"node {number}: process {process}: {command_of(process)[:200]}")
            found += [f"node {number}: in memory: {e.name}" for e in self.memory(number).iterdir()]
        return found + _left_in(self.base / self.name)

    @property
    def log(self) -> str:
        """What all launchers printed."""
        starts = enumerate(self._started, 1)
        return "\n".join(f"--- start {number}\n{trainer.log}" for number, trainer in starts)


class OnNodes(Launched):
    """A run on several *nodes* with *per_node* ranks each. The first node serves the rendezvous."""

    def __init__(
        self, nodes: Sequence[Node], base: Path, name: str, words: Sequence[str], per_node: int
    ) -> None:
        self.nodes, self.num_nodes = nodes, len(nodes)
        place = [
            f"--nnodes={len(nodes)}",
            f"--nproc-per-node={per_node}",
            f"--rdzv-endpoint={nodes[0].address}:{PORT}",
            f"--rdzv-id={name}",
        ]
        super().__init__(base, name, [*place, *words])

    @staticmethod
    def keys(base: Path, name: str) -> Mapping[str, Any]:
        """The keys of the recipe that the place of the run *name* requires."""
        return {}

    def launcher(self, number: int, directory: Path) -> Trainer:
        enter = partial(enter_node, self.nodes[number])
        return Trainer(self.words, directory, ENVIRONMENT, enter=enter, marks_at=self.marks_at)

    def hit(self, target: str, number: int, chance: random.Random) -> bool:
        if target not in (NODE, NODE_SILENTLY):
            return super().hit(target, number, chance)
        self.nodes[number].cut(silently=target == NODE_SILENTLY)
        self.nodes[number].begin()
        return True

    def processes(self, number: int) -> list[int]:
        return self.nodes[number].processes()

    def memory(self, number: int) -> Path:
        return self.nodes[number].memory


class OfTorchrun(Launched):
    """A run of a plain script under torchrun."""

    def launcher(self, number: int, directory: Path) -> Trainer:
        return Torchrun(self.words, directory, ENVIRONMENT, marks_at=self.marks_at)


def memory_at(base: Path, name: str) -> Path:
    """The directory for the memory checkpoints of the run *name* on one node."""
    return base / f"{name}-memory"


def enter_node(node: Node) -> None:
    """Move this process to the node, without what this process has set for ranks on one node."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    node.enter()
    points.install()


def kill(processes: Sequence[int]) -> bool:
    """SIGKILL; returns whether one of them was there."""
    killed = False
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            killed = True
    return killed


def _left_in(run: Path) -> list[str]:
    """Files in a run directory that a finished run must not leave."""
    found = inspect.damage(run)
    for text in inspect.leftovers(run, running=False):
        if not text.endswith((".jsonl", ".memory.json")):
            found.append(text)
    return found


def command_of(process: int) -> str:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return "ended"
