"""A process that uploads while the run trains: its start and end in the trainer, and its loop.

The trainer starts it, and writes a job to its standard input. It is a separate process,
so that no network slows down, blocks or crashes training. Failed uploads are repeated, with longer and longer pauses.
It ends when the trainer asks for it and all is uploaded, or some time after the trainer has ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.durable_io import flock, open_lock_file
from automodel_ckpt.base.python_child import start_python
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.run.links import link, pending, step_of, unlink
from automodel_ckpt.checkpoint.run.notes import read_note, write_note
from automodel_ckpt.errors import AutomodelError, LeaseLost, without_hidden

log = logging.getLogger("automodel_ckpt")

FINISH = b"finish\n"
POLL_SECONDS = 0.5
LAST_SECONDS = 60.0
"""How long uploads go on after the trainer has ended without asking for the rest."""
STALLED_SECONDS = 60.0
"""Without progress for so long, the end of a run does not wait for uploads that are not required."""
_NOTE_SECONDS, _NOTE_SECONDS_AT_END = 5.0, 1.0
"""How often the status shows the bytes that were sent of a file, while training and while the run waits."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_END_POLL_SECONDS = 0.2
_LONGEST_POLL_SECONDS = 10.0
"""The most that one poll adds to the time without progress."""
_RESTART_SECONDS, _LONGEST_RESTART_SECONDS = 5.0, 300.0
NUM_END_ATTEMPTS = 3
"""How often the end of a run starts a process that is killed while it finishes."""
_TOKEN_BYTES = 64
_NICENESS = 19
"""Of the process: the lowest priority. Where training uses all cores, it gets about 2 % of them."""
_NICENESS_VARIABLE = "AUTOMODEL_CKPT_UPLOAD_NICENESS"


@dataclass(frozen=True)
class Status:
    """How far the uploads are, as the process writes it for the trainer.

    *uploaded* is the checkpoint that was uploaded last, *sent_bytes* grows while something is sent, up to about
    *total_bytes* (0: unknown), *failures* counts failed attempts since the last success, and *error* is the message of
    the last one. *is_over*: the process does not upload any more, because another run took over. *owner* is the token
    of the start that took over the URL.
    """

    uploaded: str | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    failures: int = 0
    error: str = ""
    is_over: bool = False
    owner: str = ""

    @classmethod
    def read(cls, root: Path, file: str) -> Status:
        """Read the status of a run's process. Without a file, returns the status of a process that has not begun."""
        try:
            return cls(**read_note(root, file))
        except TypeError:
            return cls()


class UploadLoop:
    """Uploads the pending checkpoints of the run in *root* until :meth:`finish` or :meth:`stop` is called.

    *prefix* is the prefix of the links to pending checkpoints, and *status_file* the name of the file with the
    :class:`Status`.
    """

    def __init__(self, root: Path, prefix: str, status_file: str) -> None:
        self.root = root
        self.finishing = threading.Event()
        self.stopping = threading.Event()
        self.status = Status.read(root, status_file)
        self.is_newest: Callable[[], bool] = lambda: True
        """Returns whether no later start of the run has a process. Raises OSError."""
        self._prefix, self._status_file = prefix, status_file
        self._status_lock = threading.Lock()

    @property
    def sent_bytes(self) -> int:
        """The bytes that were sent."""
        return 0

    @property
    def total_bytes(self) -> int:
        """The bytes that were sent when the upload in progress is complete."""
        return 0

    @property
    def is_done(self) -> bool:
        """Whether nothing is pending."""
        return not pending(self.root, self._prefix)

    def catch_up(self) -> None:
        """Upload all pending checkpoints. Raises what an upload raises; then it is called again."""
        raise NotImplementedError

    def finish(self) -> None:
        """Make :meth:`run` return when nothing is pending."""
        self.finishing.set()

    def stop(self) -> None:
        """Make :meth:`run` return after the request in progress, however much is pending."""
        self.stopping.set()

    def note_progress(self) -> None:
        """Update the bytes in the status, if more were sent. A large file takes minutes."""
        if self.sent_bytes != self.status.sent_bytes:
            self.note()

    def run(self) -> None:
        """Upload what is pending, and what becomes pending."""
        pause = _FIRST_PAUSE_SECONDS
        while not self.stopping.is_set():
            try:
                self.catch_up()
                pause = _FIRST_PAUSE_SECONDS
                if self.finishing.is_set() and self.is_done:
                    return
                # An event that is set does not wait.
                event = self.stopping if self.finishing.is_set() else self.finishing
                event.wait(POLL_SECONDS)
            except LeaseLost as error:
                self.note(error=str(error), is_over=True)
                print_line(f"error: {error}")
                return
            except (AutomodelError, OSError) as error:
                if self.stopping.is_set():
                    return
                self.note(error=str(error), failures=self.status.failures + 1)
                # The 1st, 2nd, 4th, 8th, ... failure in a row.
                if self.status.failures & (self.status.failures - 1) == 0:
                    print_line(
                        f"warning: an upload failed, and is repeated in {pause:.0f} s: {error}"
                    )
                self.stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def note(self, **changes: Any) -> None:
        """Change fields of the status, and write it."""
        # Called by several threads: none may undo what another one has noted.
        with self._status_lock:
            numbers = {"sent_bytes": self.sent_bytes, "total_bytes": self.total_bytes}
            fields = {**asdict(self.status), **numbers, **changes}
            self.status = Status(**fields)
            with contextlib.suppress(OSError):
                write_note(self.root / self._status_file, fields)


def print_line(text: str) -> None:
    """Report to the terminal of the run, in a line that looks like the trainer's lines.

    On a terminal it is written over the live line of the trainer, which the trainer writes again below.
    """
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    if sys.stderr.isatty():
        stamp = time.strftime("\r\x1b[K%H:%M:%S")
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{stamp} {without_hidden(text)}\n")
        sys.stderr.flush()


def note_newest(root: Path, lock_file: str, token: str) -> None:
    """Record in the lock file which process is the newest. Called by the trainer, which holds the run directory."""
    with _opened_lock(root / lock_file) as descriptor:
        # In place: a new file would have another lock.
        os.pwrite(descriptor, token.ljust(_TOKEN_BYTES).encode(), 0)


@contextlib.contextmanager
def only_one(root: Path, lock_file: str, token: str) -> Iterator[Callable[[], bool]]:
    """Wait until no other process uploads the checkpoints of this run.

    Yield a function that reads whether *token* is the newest process's token. A process of an earlier start may get the
    lock late, and would undo what the later one has uploaded.
    """
    with _opened_lock(root / lock_file) as descriptor:
        flock(descriptor, waits=True)

        def is_newest() -> bool:
            found = os.pread(descriptor, _TOKEN_BYTES, 0).decode("ascii", "replace").strip()
            return found == token

        yield is_newest


@contextlib.contextmanager
def _opened_lock(lock_file: Path) -> Iterator[int]:
    descriptor = open_lock_file(lock_file, os.O_RDWR | os.O_CREAT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def serve(root: Path, lock_file: str, make: Callable[[Values], UploadLoop]) -> int:
    """Upload until the trainer asks to finish, or for :data:`LAST_SECONDS` after it has ended otherwise.

    The uploads stop earlier if a later start of the run has a process, which waits for this one and continues them.
    *make* returns the uploads of the job that the trainer wrote to the standard input. Returns the exit code.
    """
    # Unbuffered, so that select() sees what is left.
    commands = os.fdopen(0, "rb", buffering=0)
    started = json.loads(commands.readline())
    # Leave the processors to training, and the disk: the priority of reads follows. Threads inherit it.
    os.nice(started["niceness"])
    # A session is a group of the scheduler on some systems, which compares niceness only within groups.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(started["niceness"]))
    with only_one(root, lock_file, started["process"]) as is_newest:
        if not is_newest():
            return 0
        uploads = make(started["job"])
        uploads.is_newest = is_newest
        thread = threading.Thread(target=uploads.run, name="upload")
        thread.start()
        deadline = math.inf
        noted = time.monotonic()
        while thread.is_alive():
            if deadline < math.inf:
                thread.join(POLL_SECONDS)
            elif select.select([commands], [], [], POLL_SECONDS)[0]:
                is_over = commands.readline() != FINISH
                uploads.finish()
                if is_over:
                    # The trainer has ended.
                    deadline = time.monotonic() + LAST_SECONDS
            now = time.monotonic()
            with contextlib.suppress(OSError):
                if now > deadline or not is_newest():
                    uploads.stop()
            is_awaited = uploads.finishing.is_set()
            if now - noted > (_NOTE_SECONDS_AT_END if is_awaited else _NOTE_SECONDS):
                uploads.note_progress()
                noted = now
    return 0


# ---------------------------------------------------------------- in the trainer


class UploadingProcess:
    """The process, seen from the trainer: one that is killed, or fails, is started again after a pause.

    It calls ``main([ROOT])`` of *module* with what *job* returns, and writes its :class:`Status` to *status_file*.
    Links with *prefix* name the checkpoints that it uploads. Several threads may use it. *name* is for the log.
    """

    def __init__(
        self,
        module: str,
        root: Path,
        prefix: str,
        lock_file: str,
        status_file: str,
        job: Callable[[], Values],
        *,
        name: str = "the uploading process",
    ) -> None:
        self._module, self._root, self._prefix, self._job = module, root, prefix, job
        self._lock_file, self._status_file, self._name = lock_file, status_file, name
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pause_seconds = _RESTART_SECONDS
        text = os.environ.get(_NICENESS_VARIABLE, "")
        self._niceness = int(text) if text.isdecimal() else _NICENESS
        self.uploading = ""
        """How far the uploads are that a call of :meth:`finish` waits for. Empty when none does."""

    @property
    def status(self) -> Status:
        """How far the uploads are."""
        return Status.read(self._root, self._status_file)

    @property
    def is_started(self) -> bool:
        """Whether :meth:`start` was called, and :meth:`leave` was not."""
        return self._process is not None

    @property
    def pending(self) -> list[str]:
        """The checkpoints that have to be uploaded, newest first."""
        return pending(self._root, self._prefix)

    def start(self, step: float = math.inf) -> None:
        """Start the process. The run continues from *step*: later checkpoints are not uploaded. Raises OSError."""
        for name in self.pending:
            if step_of(name) > step:
                unlink(self._root, self._prefix, name)
        with self._lock:
            self._start()

    def request(self, name: str) -> None:
        """Have a checkpoint uploaded. Until it is, it is not removed from the local disk."""
        process = self._process
        has_ended = process is not None and process.poll() is not None
        if has_ended and self.status.is_over:
            # Another run took over: a link would keep the checkpoint on the local disk forever.
            log.warning("%s is not uploaded: %s", name, self.status.error)
            return
        link(self._root, self._prefix, name)
        if process is not None and has_ended:
            # Also after finish().
            self._restart(process)

    def finish(self, *, waits: bool, must_end: Callable[[], bool] = lambda: False) -> None:
        """Let the process finish what is pending, and wait for it; unless it *waits*, only while it makes progress.

        One that is killed meanwhile is replaced. The wait ends when *must_end* returns true.
        """
        try:
            for _ in range(NUM_END_ATTEMPTS):
                process = self._process
                if process is None:
                    return
                self._finish(process, waits=waits, must_end=must_end)
                # It still runs, or has ended as it should.
                if not process.poll() or must_end():
                    return
                self._restart(process)
        finally:
            self.uploading = ""

    def raise_priority(self) -> None:
        """Replace the process, if anything is pending, by one with the priority of the trainer, which needs no cores
        any more. Raises OSError."""
        # Only root could raise the priority of the one that runs. It is killed: on a busy machine, it would take long
        # to stop, with the lock that the new one waits for. What has arrived is not sent again.
        with self._lock:
            process = self._process
            if self._niceness and process is not None and self.pending:
                self._niceness = 0
                self._start()
                process.kill()
                _close(process)

    def leave(self) -> None:
        """Let the process finish what is pending, without waiting for it."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _send(process, FINISH)
            _close(process)

    def _start(self) -> None:
        token = uuid.uuid4().hex
        note_newest(self._root, self._lock_file, token)
        # In a separate session, a signal to the trainer's process group leaves it time to finish.
        process = start_python(
            self._module, str(self._root), stdin=subprocess.PIPE, start_new_session=True
        )
        started = {"process": token, "niceness": self._niceness, "job": self._job()}
        _send(process, json.dumps(started).encode() + b"\n")
        self._process = process
        # It also waits for a process that outlives the trainer's interest: otherwise, Python would warn about that.
        threading.Thread(
            target=self._watch, args=(process,), name="uploader-watch", daemon=True
        ).start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait() == 0:
            return
        while self._process is process:
            time.sleep(self._pause_seconds)
            # It may have been killed for want of memory, or fail again and again.
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_RESTART_SECONDS)
            self._restart(process)

    def _restart(self, ended: subprocess.Popen[bytes]) -> None:
        """Replace a process that has ended, unless another thread has. A failure is logged."""
        with self._lock:
            if self._process is not ended:
                return
            if ended.poll() != 0:
                log.warning("%s ended unexpectedly; it is started again", self._name)
            _close(ended)
            try:
                self._start()
            except OSError as error:
                log.warning("it could not be started: %s", error)

    def _finish(
        self, process: subprocess.Popen[bytes], *, waits: bool, must_end: Callable[[], bool]
    ) -> None:
        _send(process, FINISH)
        idle_seconds, observed_at = 0.0, time.monotonic()
        sent_bytes, began = 0, observed_at
        before = self.status
        while process.poll() is None:
            if must_end():
                return
            time.sleep(_END_POLL_SECONDS)
            now, found = time.monotonic(), self.status
            # Less than before: of another process.
            sent_bytes += max(0, found.sent_bytes - before.sent_bytes)
            self.uploading = _text(found, self.pending, sent_bytes / (now - began))
            if (found.sent_bytes, found.uploaded) != (before.sent_bytes, before.uploaded):
                before, idle_seconds = found, 0.0
            else:
                # Between two polls that are far apart, the job was suspended, and the process with it.
                idle_seconds += min(now - observed_at, _LONGEST_POLL_SECONDS)
            observed_at = now
            if idle_seconds > STALLED_SECONDS and not waits:
                return


def _text(status: Status, pending: list[str], bytes_per_second: float) -> str:
    if not pending or not status.sent_bytes:
        return ""
    of_all = f" of {size_text(status.total_bytes)}" if status.total_bytes else ""
    sent = f"{size_text(status.sent_bytes)}{of_all}"
    return f"uploading {pending[0]}: {sent}, {size_text(bytes_per_second)}/s"


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close the connection to the process, which then ends after some time at the latest."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(line)
        process.stdin.flush()
