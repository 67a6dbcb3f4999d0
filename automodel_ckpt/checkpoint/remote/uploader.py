"""Upload the checkpoints of a run while it trains.

    python -m automodel_ckpt.checkpoint.remote.uploader RUN

The trainer starts it, and writes a job to its standard input. A separate process, so that no store slows down, blocks
or crashes training. What has to be uploaded are the checkpoints with a link ``.upload-NAME`` in the run directory: the
trainer creates it when it publishes a checkpoint, and while it exists, the checkpoint is not removed. Failed uploads
are repeated, with longer and longer pauses. The process ends when the trainer asks for it and all is uploaded, or some
time after the trainer has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout, policy
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.remote import gone_back
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.store import Store
from automodel_ckpt.checkpoint.remote.transfer import Throttle
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.durable_io import replace_file
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, LeaseLost, without_hidden

LINK = ".upload-"
STATUS = ".remote.json"
LOCK = ".remote.lock"
_STATUS_BYTES = 1 << 20
FINISH = b"finish\n"
POLL_SECONDS = 0.5
LAST_SECONDS = 60.0
"""How long uploads go on after the trainer has ended without asking for the rest."""
_NOTE_SECONDS = 5.0
"""How often the status shows the bytes that were sent of a file."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_LOGS = (layout.TRAINING_LOG, layout.VALIDATION_LOG)


@dataclass(frozen=True, slots=True)
class Job:
    """What to upload where. *went_back_to* is the step that the run resumed from; later checkpoints are superseded."""

    url: str
    options: Mapping[str, Any]
    token: str
    metric_key: str
    mode: policy.Mode
    keep_last: int | None = None
    keep_best: int = 0
    keep_every_steps: int | None = None
    keep_steps: Sequence[int] = ()
    bytes_per_second: float | None = None
    num_threads: int = 8
    went_back_to: int = 0

    @property
    def keep(self) -> policy.KeepPolicy:
        """The keep policy of the store."""
        return policy.KeepPolicy(
            self.keep_last,
            self.keep_best,
            self.keep_every_steps,
            frozenset(self.keep_steps),
            self.mode,
        )


@dataclass(frozen=True, slots=True)
class Status:
    """How far the uploads are, as the process writes it for the trainer.

    *uploaded* is the checkpoint that was uploaded last, *sent_bytes* grows while something is sent, *failures* counts
    failed attempts since the last success, and *error* is the message of the last one. *is_over*: the process does not
    upload any more, because another run took over. *owner* is the token of the start that took over the URL.
    """

    uploaded: str | None = None
    sent_bytes: int = 0
    failures: int = 0
    error: str = ""
    is_over: bool = False
    owner: str = ""

    @classmethod
    def read(cls, root: Path) -> Status:
        """Read the status of the process of a run; that of one that has not begun if there is none."""
        try:
            return cls(**parse_json(read_safely(root, STATUS, limit=_STATUS_BYTES)))
        except (OSError, ValueError, TypeError):
            return cls()


def pending(root: Path) -> list[str]:
    """List the checkpoints that have to be uploaded, newest first. Links to removed ones are deleted."""
    names = []
    for entry in list(os.scandir(root)):
        if not entry.name.startswith(LINK) or not entry.is_symlink():
            continue
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            # The trainer and the uploading process both call this, and the latter removes links.
            continue
        parsed = layout.parse_checkpoint_name(target)
        if parsed is None or not (root / target).is_dir():
            # Superseded, or removed by hand.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
        else:
            names.append(parsed)
    return [str(name) for name in sorted(names, reverse=True)]


class Uploader:
    """Uploads the pending checkpoints of the run in *root* until :meth:`finish` or :meth:`stop` is called."""

    def __init__(self, root: Path, job: Job) -> None:
        self._root, self._job = root, job
        self._store = Store(job.url, job.options, where="checkpoint.remote")
        self._run = RemoteRun(self._store, token=job.token)
        self._throttle = Throttle(job.bytes_per_second)
        self._finishing = threading.Event()
        self._stopping = threading.Event()
        self._has_begun = False
        # After a run went back, the status of an earlier process may name a later step.
        self._is_first = True
        self._status = Status.read(root)
        self._status_lock = threading.Lock()
        self._note(error="", failures=0, is_over=False)

    def finish(self) -> None:
        """Make :meth:`run` return when nothing is pending."""
        self._finishing.set()

    def stop(self) -> None:
        """Make :meth:`run` return after the request in progress, however much is pending."""
        self._stopping.set()
        self._throttle.stop()

    def note_progress(self) -> None:
        """Update the bytes in the status, if more were sent. A large file takes minutes."""
        if self._throttle.nbytes != self._status.sent_bytes:
            self._note()

    def run(self) -> None:
        """Upload what is pending, and what becomes pending."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            try:
                self._catch_up()
                pause = _FIRST_PAUSE_SECONDS
                if self._finishing.is_set() and not pending(self._root):
                    return
                self._finishing.wait(POLL_SECONDS)
            except LeaseLost as error:
                self._note(error=str(error), is_over=True)
                _print(f"error: {error}")
                return
            except (AutomodelError, OSError) as error:
                if self._stopping.is_set():
                    return
                self._note(error=str(error), failures=self._status.failures + 1)
                # The 1st, 2nd, 4th, 8th, ... failure in a row.
                if self._status.failures & (self._status.failures - 1) == 0:
                    _print(f"warning: an upload failed, and is repeated in {pause:.0f} s: {error}")
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _catch_up(self) -> None:
        """Upload all pending checkpoints. Raises what an upload raises."""
        job = self._job
        if not self._has_begun:
            self._become_owner()
            for name in self._run.supersede_after(job.went_back_to, job.metric_key, job.mode):
                _print(f"marked {self._store}/{name} as superseded")
            gone_back.forget(self._root)
            self._has_begun = True
        while (names := self._worth_uploading()) and not self._stopping.is_set():
            self._upload(names[0])

    def _become_owner(self) -> None:
        """Take over the URL, once: a repetition would take it back from a run that started meanwhile."""
        token = self._job.token
        if self._status.owner == token:
            # Also in an earlier process of this start, which ended unexpectedly.
            self._run.continue_ownership()
            return
        if not self._run.take_over():
            _print(
                f"{self._store} has no conditional writes: two runs with this URL could overwrite each other's objects"
            )
        self._note(owner=token)

    def _worth_uploading(self) -> list[str]:
        """The pending checkpoints, newest first, without those that the keep policy of the store would remove."""
        names = pending(self._root)
        if len(names) < 2 or self._job.keep_last is None:
            return names
        records = {}
        for name in names:
            found = resume.record(self._root, name, self._job.metric_key, {})
            if found is not None:
                records[name] = found
        for record in self._job.keep.removable(list(records.values()), {names[0]}):
            if (self._root / f"{LINK}{record.name}.json").exists():
                # What an interrupted upload has sent. Pointers name it if only its link was left.
                with contextlib.suppress(ValueError):
                    self._run.withdraw(record.name)
            unlink(self._root, record.name)
        return [name for name in names if (self._root / f"{LINK}{name}").is_symlink()]

    def _upload(self, name: str) -> None:
        job = self._job
        started = time.monotonic()
        try:
            nbytes = push_checkpoint(
                self._run,
                self._root / name,
                self._root / f"{LINK}{name}.json",
                throttle=self._throttle,
                num_threads=job.num_threads,
                on_file=lambda file: self._note(),
            )
        except CheckpointUnusable as error:
            # Repeating cannot help: the checkpoint is damaged, or something else has its name.
            _print(f"warning: {name} is not uploaded: {error}")
            self._note(error=str(error))
            unlink(self._root, name)
            return
        for log in _LOGS:
            with contextlib.suppress(FileNotFoundError):
                data = read_safely(self._root, log)
                self._run.check_owner()
                self._store.write(log, data)
        self._run.point(job.metric_key, job.mode)
        unlink(self._root, name)
        newest = self._status.uploaded
        if newest is None or step_of(newest) < step_of(name) or self._is_first:
            newest = name
        self._is_first = False
        self._note(uploaded=newest, failures=0, error="")
        seconds = max(time.monotonic() - started, 1e-3)
        _print(f"uploaded {name} to {self._store}: {nbytes / 1e6:.1f} MB in {seconds:.1f} s")
        for removed in self._run.prune(job.keep, job.metric_key):
            _print(f"removed {self._store}/{removed}")

    def _note(self, **changes: Any) -> None:
        # Called by several threads: none may undo what another one has noted.
        with self._status_lock:
            fields = {**asdict(self._status), "sent_bytes": self._throttle.nbytes, **changes}
            self._status = Status(**fields)
            with contextlib.suppress(OSError):
                replace_file(self._root / STATUS, json.dumps(fields).encode())


def step_of(name: str) -> int:
    """The step in the name of a checkpoint; -1 for any other name."""
    parsed = layout.parse_checkpoint_name(name)
    return parsed.step if parsed else -1


def unlink(root: Path, name: str) -> None:
    """Remove the link of a checkpoint that has to be uploaded, and the record of how far its upload is."""
    (root / f"{LINK}{name}").unlink(missing_ok=True)
    (root / f"{LINK}{name}.json").unlink(missing_ok=True)


def _print(text: str) -> None:
    """Report to the terminal of the run, in a line that looks as those of the trainer."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{stamp} {without_hidden(text)}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Wait until no other process uploads the checkpoints of this run."""
    # Not through a link, which could create a file anywhere.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(root / LOCK, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Upload until the trainer asks to finish, or for :data:`LAST_SECONDS` after it has ended otherwise."""
    root = Path(arguments[0])
    # Unbuffered, so that select() sees what is left.
    commands = os.fdopen(0, "rb", buffering=0)
    job = Job(**json.loads(_line(commands)))
    with only_one(root):
        uploader = Uploader(root, job)
        thread = threading.Thread(target=uploader.run, name="upload")
        thread.start()
        deadline = math.inf
        noted = time.monotonic()
        while thread.is_alive():
            if deadline < math.inf:
                thread.join(POLL_SECONDS)
            elif select.select([commands], [], [], POLL_SECONDS)[0]:
                is_over = _line(commands) != FINISH
                uploader.finish()
                if is_over:
                    # The trainer has ended.
                    deadline = time.monotonic() + LAST_SECONDS
            now = time.monotonic()
            if now > deadline:
                uploader.stop()
            if now - noted > _NOTE_SECONDS:
                uploader.note_progress()
                noted = now
    return 0


def _line(commands: Any) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = commands.read(1)
        if not byte:
            return line
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
