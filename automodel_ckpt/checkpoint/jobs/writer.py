"""The process that writes a rank's asynchronous saves. It imports no torch and does not communicate with other ranks.

The trainer starts it once and sends it commands through a pipe; the bytes to write are in shared memory. It runs at a
low priority, blocks signals, and exits immediately when the trainer has ended: the next start removes an unpublished
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
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.base.python_child import start_python
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.files.threads import collector_paused
from automodel_ckpt.checkpoint.jobs.jobs import run_all
from automodel_ckpt.checkpoint.jobs.rank_manifest import (
    RankManifest,
    finalize,
    read_rank_manifests,
)
from automodel_ckpt.checkpoint.jobs.reuse import Previous
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import RESUME
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run.lease import check_token
from automodel_ckpt.errors import AutomodelError, SaveFailed

# Not SCHED_IDLE: on a busy machine, a save took twice as long.
NICENESS = 10
_POLL_SECONDS = 1.0
_REPORT_SECONDS = 0.25
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_ENDED = "the process that writes this rank's checkpoints ended unexpectedly"


@dataclass(frozen=True, slots=True)
class Write:
    """Run the pickled *jobs* below *staging* on the first *memory_bytes* of shared memory; write the rank manifest.

    *previous* is the checkpoint whose unchanged files are shared.
    """

    staging: str
    written: RankManifest
    jobs: Sequence[bytes]
    memory_bytes: int
    previous: Previous | None = None

    @collector_paused()
    def run(self, memory: SharedMemory) -> None:
        staging = Path(self.staging)
        view = memory.view(self.memory_bytes)
        for jobs in self.jobs:
            run_all(pickle.loads(jobs), staging, self.written, view, self.previous)
        # The last action: as soon as the file appears, rank 0 may publish and remove its directory.
        commit.write_by_rename(
            staging / layout.rank_manifest_file(self.written.rank), self.written.to_bytes()
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
            done = consolidate(
                Path(source), log=log_lines.append, before_publishing=self._check_lease
            )
            output = str(done.output)
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

    @collector_paused()
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
        commands_read, commands_write = os.pipe()
        answers_read, answers_write = os.pipe()
        numbers = (memory, commands_read, answers_write, os.getpid())
        # The process inherits the mask, so that a signal to the process group does not end it before the trainer.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self._process = start_python(
                __name__,
                *map(str, numbers),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(memory, commands_read, answers_write),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            # Only the process may have these ends: each side notices the end of the other by a closed pipe.
            os.close(commands_read)
            os.close(answers_write)
        self._commands: IO[bytes] = open(commands_write, "wb")  # noqa: SIM115 (closed by end)
        self._answers: IO[bytes] = open(answers_read, "rb")  # noqa: SIM115 (closed by end)
        self.written_bytes = 0
        """Bytes written by the :class:`Write` in progress, or by the last one."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def activity(self) -> tuple[bytes, ...]:
        """Counters that change when the process has computed, read or written anything; empty after its end."""
        process = Path(f"/proc/{self.pid}")
        try:
            # Fields 14 and 15 of proc_pid_stat(5): user and system time. The name in parentheses may contain spaces.
            _, _, fields = (process / "stat").read_bytes().rpartition(b")")
        except OSError:  # the process has ended
            return ()
        counters = [*fields.split()[11:13], b"%d" % self.written_bytes]
        # Hardened systems restrict this file to debuggers (ptrace_scope, hidepid). The other counters remain.
        with contextlib.suppress(OSError):
            counters.append((process / "io").read_bytes())
        return tuple(counters)

    def do(self, command: Command) -> Any:
        """Run a command and return its result. Raises its exception, or :class:`SaveFailed` where the process died."""
        try:
            pickle.dump(command, self._commands)
            self._commands.flush()
            is_write = isinstance(command, Write)
            if is_write:
                self.written_bytes = 0
            failed, value = pickle.load(self._answers)
            while failed is None:  # a report of progress
                if is_write:
                    self.written_bytes = value
                failed, value = pickle.load(self._answers)
        # UnpicklingError: the process died while it wrote an answer.
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._died(command) from error
        if failed:
            raise value
        return value

    def _died(self, command: Command) -> SaveFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        how = f"code {code}"
        if code is not None and code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
        where = command.sources[0] if isinstance(command, Export) else command.staging
        return SaveFailed(
            _ENDED,
            where=where,
            value=f"process {self.pid}: {how}",
            hint="check what killed it (the system log reports out-of-memory kills)",
            restart=RESUME,
        )

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        # A process in a call to a disk that does not respond ends only when the call returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
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


def main(arguments: list[str]) -> None:
    """Run commands from the pipe until it closes.

    *arguments*: descriptors of the memory, of the pipes for commands and answers; the trainer's process id.
    """
    memory, commands, answers, trainer = map(int, arguments)
    os.nice(NICENESS)
    todo: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    idle = threading.Event()
    idle.set()
    threading.Thread(target=_listen, args=(commands, trainer, todo, idle), daemon=True).start()
    shared = SharedMemory(memory)
    # A broken pipe means that the trainer has ended.
    with contextlib.suppress(BrokenPipeError), open(answers, "wb") as out:
        while (command := todo.get()) is not None:
            with _reporting(out):
                outcome = _outcome(command, shared)
            idle.set()  # before the answer: the trainer may then send the next command
            pickle.dump(outcome, out)
            out.flush()


def _listen(
    commands: int, trainer: int, todo: queue.SimpleQueue[Command | None], idle: threading.Event
) -> None:
    """Queue commands; end the process when the trainer has ended.

    The parent process is checked too: a data-loader worker of the trainer may keep its end of the pipe open.
    """
    poll = select.poll()
    poll.register(commands, select.POLLIN)
    # The trainer sends one command and waits for its answer. A second one in the buffer of this
    # file would be invisible to poll.
    with open(commands, "rb") as incoming:
        while True:
            if not poll.poll(_POLL_SECONDS * 1000):
                # os._exit: in a thread, sys.exit would end only the thread.
                if os.getppid() != trainer:
                    os._exit(1)
                continue
            try:
                command = pickle.load(incoming)
            except (EOFError, pickle.UnpicklingError):
                # The trainer ended during a command: no process awaits its result.
                if not idle.is_set():
                    os._exit(1)
                todo.put(None)
                return
            except Exception:
                # Another version of the package was installed since the trainer was started.
                traceback.print_exc()
                os._exit(1)
            idle.clear()
            todo.put(command)


@contextlib.contextmanager
def _reporting(out: IO[bytes]) -> Iterator[None]:
    """During the block and at its end, send the number of written bytes to the trainer as (None, number)."""
    bytes_before = METER.nbytes
    ended = threading.Event()

    def report() -> None:
        with contextlib.suppress(OSError):  # the trainer has ended
            pickle.dump((None, METER.nbytes - bytes_before), out)
            out.flush()

    def report_repeatedly() -> None:
        while not ended.wait(_REPORT_SECONDS):
            report()

    thread = threading.Thread(target=report_repeatedly, name="report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # The thread must not write to the pipe any more: the answer follows.
        ended.set()
        thread.join()
        report()


def _outcome(command: Command, shared: SharedMemory) -> tuple[bool, Any]:
    """Run a command. Returns (whether it failed, the answer or the exception)."""
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
