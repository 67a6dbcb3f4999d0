"""`ckpt-train` on two ranks, started by a server of commands, which has imported torch: a start costs a second."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support.servers.command_server import CommandServer
from tools.crash.endurance import kill_session, members

ROOT = Path(__file__).parents[2]


class Mark(NamedTuple):
    """A line of a rank's marks (:mod:`tools.crash.marks`)."""

    seconds: float
    name: str
    step: int


@dataclass
class Trainer:
    """A started command. *directory* gets its output, its marks and its temporary files."""

    commands: CommandServer
    words: Sequence[str]
    directory: Path
    environment: Mapping[str, str]
    pid: int = 0
    code: int | None = None
    _marks: dict[int, tuple[int, list[Mark]]] = field(default_factory=dict)

    def __enter__(self) -> Trainer:
        (self.directory / "tmp").mkdir(parents=True)
        variables = {"TMPDIR": str(self.directory / "tmp"), "CRASH_MARKS": str(self.directory)}
        with (self.directory / "log").open("a") as log:
            self._process = self.commands.popen(
                "ckpt-train",
                *self.words,
                cwd=ROOT,
                env={**os.environ, **self.environment, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid
        return self

    def __exit__(self, *error: object) -> None:
        kill_session(self.pid)
        self.wait(5)

    def wait(self, seconds: float) -> bool:
        """Whether the command ends within so many seconds; then *code* is its exit code, negative for a signal."""
        try:
            self.code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def marks(self, rank: int) -> list[Mark]:
        """What this rank has noted so far."""
        done, known = self._marks.get(rank, (0, []))
        try:
            with (self.directory / f"marks_{rank}").open() as file:
                file.seek(done)
                text = file.read()
        except FileNotFoundError:
            return known
        whole = text[: text.rfind("\n") + 1]
        for line in whole.splitlines():
            seconds, name, step = line.split()
            known.append(Mark(float(seconds), name, int(step)))
        self._marks[rank] = (done + len(whole), known)
        return known

    def ranks(self) -> dict[int, int]:
        """The process ids of the ranks that run on this node, by local rank: the launcher forks them in this order."""
        return dict(enumerate(forked_ranks(self.pid)))

    def orphans(self, seconds: float = 2.0) -> list[int]:
        """Processes of the command that are left so long after its end."""
        end = time.monotonic() + seconds
        while (left := [*members(self.pid)]) and time.monotonic() < end:
            time.sleep(0.01)
        return left

    @property
    def log(self) -> str:
        """All that it has printed."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def send(self, target: str, number: signal.Signals) -> float:
        """Send a signal to ``launcher``, ``rank0`` or ``rank1``; the instant. ProcessLookupError when it is gone."""
        pid = self._pid_of(target)
        if pid is None:
            raise ProcessLookupError(target)
        os.kill(pid, number)
        return time.monotonic()

    def listens(self, target: str) -> bool:
        """Whether it is there and has a handler for SIGUSR1; before, a signal does what the system lets it do."""
        try:
            status = Path(f"/proc/{self._pid_of(target)}/status").read_text().splitlines()
        except FileNotFoundError:
            return False
        caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)

    def _pid_of(self, target: str) -> int | None:
        return self.pid if target == "launcher" else self.ranks().get(int(target[-1]))


def forked_ranks(launcher: int) -> list[int]:
    """The process ids of the ranks that run, which a launcher has forked."""
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except FileNotFoundError:
        return []
    return sorted(map(int, children))
