"""The process that writes a rank's asynchronous saves. It imports no torch and talks to no other rank.

The trainer starts it once and sends it commands through a pipe; the bytes to write are in shared memory. It runs at a
low priority, blocks signals, and exits immediately when the trainer is gone: the next start removes an unpublished
checkpoint.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.run.lease import check_token
from automodel_ckpt.checkpoint.writing.jobs import run_all
from automodel_ckpt.checkpoint.writing.rank_manifest import (
    RankManifest,
    finalize,
    read_rank_manifests,
)
from automodel_ckpt.errors import AutomodelError, SaveFailed

NICENESS = 10
_LOOK_SECONDS = 1.0
_REPORT_SECONDS = 0.25
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_GONE = "the process that writes this rank's checkpoints ended unexpectedly"
# The trainer's own search path, whatever it was started as: nothing may be found in the working directory instead.
_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "from automodel_ckpt.checkpoint.writing.writer import main; main()"
)


@dataclass(frozen=True, slots=True)
class Write:
    """Run the pickled *jobs* below *staging* on the first *memory_bytes* of shared memory; write the rank manifest."""

    staging: str
    written: RankManifest
    jobs: Sequence[bytes]
    memory_bytes: int

    def run(self, memory: SharedMemory) -> None:
        staging = Path(self.staging)
        for jobs in self.jobs:
            run_all(pickle.loads(jobs), staging, self.written, memory.view(self.memory_bytes))
        commit.write_by_rename(
            staging / layout.part_file(self.written.rank), self.written.to_bytes()
        )


@dataclass(frozen=True, slots=True)
class Export:
    """Export these model directories of a checkpoint as Hugging Face files. Returns (last output directory, log lines).

    *lease* is the run directory's lock file and the run's token in it: an export is published only while it is there.
    """

    sources: Sequence[str]
    lease: tuple[Path, str] | None = None

    def run(self, memory: SharedMemory) -> tuple[str, list[str]]:
        from automodel_ckpt.checkpoint.export.consolidate import consolidate

        log_lines: list[str] = []
        output = ""
        for source in self.sources:
            output = str(
                consolidate(
                    Path(source), log=log_lines.append, before_publishing=self._check_lease
                ).output
            )
        return output, log_lines

    def _check_lease(self) -> None:
        """Raise :class:`LeaseLost` where another run took over the run directory."""
        if self.lease is not None:
            check_token(*self.lease)


@dataclass(frozen=True, slots=True)
class Finalize:
    """Finalize *staging*, which has all rank manifests. Returns the bytes of all files.

    *common* has the files that rank 0 wrote in addition to its rank manifest.
    """

    staging: str
    partial_manifest: Manifest
    common: RankManifest

    def run(self, memory: SharedMemory) -> int:
        staging = Path(self.staging)
        rank_manifests = read_rank_manifests(staging, self.partial_manifest.world_size)
        rank_manifests[self.common.rank].files.update(self.common.files)
        return finalize(staging, self.partial_manifest, rank_manifests)


Command = Write | Finalize | Export


class Writer:
    """The trainer's handle of a writer process that shares the memory behind a file descriptor."""

    def __init__(self, memory: int) -> None:
        """Start the process. Raises OSError."""
        commands, mine = os.pipe()
        answers, theirs = os.pipe()
        arguments = [str(number) for number in (memory, commands, theirs, os.getpid())]
        path = "\n".join(os.path.abspath(entry) for entry in sys.path)
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, _BLOCKED
        )  # inherited, so that it never dies of one
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(memory, commands, theirs),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(commands)
            os.close(theirs)
        self._commands: IO[bytes] = open(mine, "wb")  # noqa: SIM115 (closed by end)
        self._answers: IO[bytes] = open(answers, "rb")  # noqa: SIM115 (closed by end)
        self.written_bytes = 0
        """By the :class:`Write` under way, or the last one."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def sign_of_life(self) -> tuple[bytes, ...]:
        """A value that changes when the process has computed, read or written anything; empty after its end."""
        with contextlib.suppress(OSError):  # it has ended
            process = Path(f"/proc/{self.pid}")
            times = (process / "stat").read_bytes().rpartition(b")")[2].split()[11:13]
            return (*times, (process / "io").read_bytes())
        return ()

    def do(self, command: Command) -> Any:
        """Run a command and return its result. Raises its exception, or :class:`SaveFailed` where the process died."""
        try:
            pickle.dump(command, self._commands)
            self._commands.flush()
            written = isinstance(command, Write)
            self.written_bytes = 0 if written else self.written_bytes
            while (answer := pickle.load(self._answers))[0] is None:
                self.written_bytes = answer[1] if written else self.written_bytes
            failed, value = answer
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._died(command) from error
        if failed:
            raise value
        return value

    def _died(self, command: Command) -> SaveFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        how = (
            f"signal {-code} ({signal.Signals(-code).name})"
            if code is not None and code < 0
            else f"code {code}"
        )
        where = command.sources[0] if isinstance(command, Export) else command.staging
        return SaveFailed(
            _GONE,
            where=where,
            value=f"process {self.pid}: {how}",
            hint="check what killed it (the system log reports out-of-memory kills), then run the same command "
            "to resume from the previous checkpoint",
        )

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # a call into a disk that hangs cannot be interrupted
            self._process.wait(5)

    def end(self) -> None:
        """End the process after its current command."""
        for stream in (self._commands, self._answers):
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()


class SharedMemory:
    """The writer process's mapping of the memory; mapped again after it has grown."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def view(self, nbytes: int) -> memoryview:
        if nbytes == 0:
            return memoryview(b"")
        size = os.fstat(self._descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self._descriptor, size)
        return memoryview(self._map)[:nbytes]


def main() -> None:
    """Run commands from the pipe until it closes.

    ``sys.argv``: descriptors of the memory, of the pipes for commands and answers; the trainer's process id.
    """
    memory, commands, answers, trainer = map(int, sys.argv[1:])
    os.nice(NICENESS)
    todo: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    idle = threading.Event()
    idle.set()
    threading.Thread(target=_listen, args=(commands, trainer, todo, idle), daemon=True).start()
    shared = SharedMemory(memory)
    # What cannot be answered was asked by a trainer that is gone.
    with contextlib.suppress(BrokenPipeError), open(answers, "wb") as out:
        while (command := todo.get()) is not None:
            with _reporting(out):
                outcome = _outcome(command, shared)
            idle.set()  # before the answer, on which the next command may follow
            pickle.dump(outcome, out)
            out.flush()


def _listen(
    commands: int, trainer: int, todo: queue.SimpleQueue[Command | None], idle: threading.Event
) -> None:
    """Queue commands; end the process when the trainer has gone (a data-loader worker may hold the pipe open)."""
    poll = select.poll()
    poll.register(commands, select.POLLIN)
    with open(commands, "rb") as incoming:
        while True:
            if not poll.poll(_LOOK_SECONDS * 1000):
                if os.getppid() != trainer:
                    os._exit(1)
                continue
            try:
                command = pickle.load(incoming)
            except (EOFError, pickle.UnpicklingError):
                if not idle.is_set():
                    os._exit(1)
                todo.put(None)
                return
            except (
                Exception
            ):  # another version of the package was installed since the trainer was started
                traceback.print_exc()
                os._exit(1)
            idle.clear()
            todo.put(command)


@contextlib.contextmanager
def _reporting(out: IO[bytes]) -> Iterator[None]:
    """During the block and at its end, send the number of written bytes to the trainer as (None, number)."""
    before, ended = METER.nbytes, threading.Event()

    def tell() -> None:
        with contextlib.suppress(OSError):  # the trainer is gone
            pickle.dump((None, METER.nbytes - before), out)
            out.flush()

    def report() -> None:
        while not ended.wait(_REPORT_SECONDS):
            tell()

    thread = threading.Thread(target=report, name="report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        tell()


def _outcome(command: Command, shared: SharedMemory) -> tuple[bool, Any]:
    """(whether it failed, the answer or the exception)"""
    try:
        return False, command.run(shared)
    except (OSError, AutomodelError) as error:
        return True, _portable(error)
    except Exception:
        return True, RuntimeError(traceback.format_exc())


def _portable(error: OSError | AutomodelError) -> Exception:
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename)
    return error
