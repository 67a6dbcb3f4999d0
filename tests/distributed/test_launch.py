"""Real ranks through the real launcher: how they start, how they fail, and what the user reads last."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ranks import free_port

ROOT = Path(__file__).parents[2]
FAKE = "tests.support.fake_train"
DISK_FULL = "cannot write\n  where:  shard\n  value:  ENOSPC\n  remedy: make room"


class Command:
    """A started command, and what it left."""

    def __init__(self, notes: Path, words: list[str], variables: dict[str, str]) -> None:
        self.notes = notes
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
        self.process = subprocess.Popen(
            [sys.executable, *words, "--notes", str(notes)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.code: int | None = None
        self.out = self.err = ""

    def wait(self, seconds: float = 60) -> Command:
        self.out, self.err = self.process.communicate(timeout=seconds)
        self.code = self.process.returncode
        return self

    def note(self, name: str) -> list[str]:
        path = self.notes / name
        return path.read_text().splitlines() if path.exists() else []

    def pids(self) -> list[int]:
        """Process ids of the ranks of the newest attempt."""
        return [int(self.note(f"started_{rank}")[-1].split()[0]) for rank in (0, 1)]

    def wait_for(self, *notes: str, seconds: float = 40) -> Command:
        wait_until(lambda: all((self.notes / name).exists() for name in notes), seconds)
        return self


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Start:
    """Starts commands whose ranks write their notes into one directory."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.commands: list[Command] = []

    def __call__(self, case: str, *flags: str, ranks: int = 2, **variables: str) -> Command:
        number = ["--nproc-per-node", str(ranks)] if ranks else []
        return self._begin(["-m", FAKE, case, *flags, *number], variables)

    def torchrun(self, case: str) -> Command:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", FAKE, case]
        return self._begin(words, {"OMP_NUM_THREADS": "1"})

    def test_under_srun_the_processes_are_the_ranks(start: Start) -> None:
    commands = [command.wait() for command in start.srun("ok")]
    assert [(command.code, command.out, command.err) for command in commands] == [
        (0, "rank 0 trained\n", ""),
        (0, "rank 1 trained\n", ""),
    ]


def test_under_srun_a_failure_has_its_own_code_and_is_said_once(start: Start) -> None:
    commands = [command.wait() for command in start.srun("save_fails_on_all")]
    assert [command.code for command in commands] == [4, 4]
    assert "".join(command.err for command in commands) == f"error: rank 1: {DISK_FULL}\n"
