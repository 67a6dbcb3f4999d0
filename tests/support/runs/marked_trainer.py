"""`ckpt-train` on two ranks, started by a server of commands, which has imported torch: a start costs a second."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.servers.command_server import CommandServer
from tools.support import ROOT, environment


class Mark(NamedTuple):
    seconds: float
    name: str
    step: int


@dataclass
class Trainer:
    """A started command. *directory* gets its output, its marks and its temporary files."""

    commands: CommandServer
    words: Sequence[str]
    directory: Path
    variables: Mapping[str, str]
    pid: int = 0
    code: int | None = None

    def __enter__(self) -> Self:
        (self.directory / "tmp").mkdir(parents=True)
        variables = {"TMPDIR": str(self.directory / "tmp"), "CRASH_MARKS": str(self.directory)}
        with (self.directory / "log").open("a") as log:
            self._process = self.commands.popen(
                "ckpt-train",
                *self.words,
                cwd=ROOT,
                env=environment(**self.variables, **variables),
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
        path = self.directory / f"marks_{rank}"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        fields = [line.split() for line in whole.splitlines()]
        return [Mark(float(seconds), name, int(step)) for seconds, name, step in fields]

    def orphans(self, seconds: float = 2.0) -> list[int]:
        """Processes of the command that are left so long after its end."""
        end = time.monotonic() + seconds
        while (left := [*members(self.pid)]) and time.monotonic() < end:
            time.sleep(0.01)
        return left

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def send(self, target: str, number: signal.Signals) -> float:
        """Send a signal to ``launcher``, ``rank0`` or ``rank1``; the instant. ProcessLookupError when it is gone."""
        os.kill(self._pid_of(target), number)
        return time.monotonic()

    def listens(self, target: str) -> bool:
        """Whether it is there and has a handler for SIGUSR1; before, a signal does what the system lets it do."""
        try:
            status = Path(f"/proc/{self._pid_of(target)}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return False
        caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)

    def _pid_of(self, target: str) -> int:
        if target == "launcher":
            return self.pid
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            # The launcher forks the ranks in their order.
            return sorted(map(int, children))[int(target[-1])]
        except (FileNotFoundError, IndexError):
            raise ProcessLookupError(target) from None


def kill_session(session: int) -> None:
    """Send SIGKILL to every process of the session, until none is left."""
    # With `nice` on a busy machine, it can take half a minute until they have released their memory.
    end = time.monotonic() + 180
    while left := [*members(session)]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise RuntimeError(f"processes {left} do not end")
        time.sleep(0.01)


def members(session: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == session and not _is_zombie(entry):
                yield int(entry)
        except (ProcessLookupError, FileNotFoundError):
            continue


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
