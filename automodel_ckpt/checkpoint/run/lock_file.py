"""The lock file of a run directory: the record of its owner, and whether its owner lives; requests that it saves now.

The file is opened for every read, because network file systems compare their caches with the server when a file is
opened. A request is an empty file in the directory, which rank 0 looks for between steps; a note has the outcome. Who
requests a save while another request waits gets the same answer. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import (
    file_system_identity,
    file_system_of,
    is_gone,
    kernel_boot_id,
    pid_namespace,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.run.notes import read_note, write_note
from automodel_ckpt.errors import LeaseLost, RecipeError, SaveFailed

WATCH_SECONDS = 20.0
CACHED_WATCH_SECONDS = 90.0
"""The watch on a FUSE mount: gcsfuse caches for 60 seconds, sshfs for 20."""
_RECORD_BYTES = 2048
_NO_HARD_LINKS_HERE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a lock file. Fields with defaults may be missing."""

    host: str
    boot_id: str
    pid: int
    command: str
    beat: int
    token: str = ""
    pid_namespace: str = ""
    device: int = -1
    file_system_id: int = -1

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """Read the record at the start of an open lock file. Returns None when the content is not a record."""
        try:
            # A record can exceed its padding: JSON escapes the command's non-ASCII characters.
            raw = parse_json(os.pread(descriptor, 2 * _RECORD_BYTES, 0))
            fields = {name: raw[name] for name in cls.__slots__ if name in raw}
            holder = cls(**fields)
        except (ValueError, TypeError):
            return None
        texts = [holder.host, holder.boot_id, holder.command, holder.token, holder.pid_namespace]
        numbers = (holder.pid, holder.beat, holder.device, holder.file_system_id)
        if not all(isinstance(text, str) for text in texts):
            return None
        if not all(type(number) is int for number in numbers):
            return None
        return holder

    def to_bytes(self) -> bytes:
        """Convert to JSON, padded to a fixed size, so that a shorter record overwrites a longer one completely."""
        content = json.dumps(asdict(self)).encode()
        return content.ljust(_RECORD_BYTES)

    def is_this_process(self) -> bool:
        """Whether this process is the owner."""
        here = (os.getpid(), kernel_boot_id() or socket.gethostname(), pid_namespace())
        return (self.pid, self.boot_id, self.pid_namespace) == here

    def has_ended(self, descriptor: int, is_locked: bool) -> bool:
        """Whether the holder's process has certainly ended. *is_locked*: this run has locked the open file.

        False if that cannot be determined: on another node, in another container, or if another process has the same
        number now.
        """
        if self.boot_id != kernel_boot_id():
            return False
        # On the same mounted file system, the kernel has one set of locks for each file.
        if is_locked and (self.device, self.file_system_id) == file_system_identity(descriptor):
            return True
        return (
            bool(self.pid_namespace) and self.pid_namespace == pid_namespace() and is_gone(self.pid)
        )


def is_beating(path: Path, seconds: float) -> bool:
    """Watch the lock file for *seconds*. Returns True as soon as its record changes; False if it does not."""
    first = read_holder(path)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.2, seconds / 10))
        now = read_holder(path)
        if now is None and not os.path.lexists(path):
            return False  # the owner released the directory
        if first is None:
            first = now
        if now is not None and now != first:
            return True
    return False


def read_holder(path: Path) -> Holder | None:
    """Return the current record in the lock file, or None when it cannot be read."""
    with contextlib.suppress(OSError), os.fdopen(open_lock_file(path, os.O_RDONLY), "rb") as file:
        return Holder.read(file.fileno())
    return None


def usual_watch_seconds(root: Path) -> float:
    """How long an owner of the run directory *root* must have no heartbeat, by the type of its file system."""
    kind = file_system_of(Path(os.path.realpath(root))) or ""
    if kind.startswith(("fuse", "virtiofs")):
        return CACHED_WATCH_SECONDS
    return WATCH_SECONDS


def open_lock_file(path: Path, flags: int) -> int:
    """Open a lock file with *flags* of ``os.open``; returns the descriptor. Raises OSError."""
    # A link or a pipe that replaced the file after its type was checked is neither followed nor
    # waited for.
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether *path* is still the name of the open file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def link_or_rename(source: Path, target: Path) -> bool:
    """Name the file *source* *target*, by a hard link if the file system has them. Returns False if *target* exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS_HERE:
            raise
        # Two runs that start at the same time may both rename. The first check of one of them detects that.
        if os.path.lexists(target):
            return False
        os.rename(source, target)
    return True


def reject_special_file(path: Path) -> None:
    """Raise :class:`RecipeError` if the lock file is a link or a device, which must not be opened."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise RecipeError(
                "the lock file of this directory is not a regular file",
                where=path,
                value=stat.filemode(mode),
                hint="remove it: a run creates only regular files",
            )


class HeldByThisProcess(RecipeError):
    """Another object of this process holds the directory."""


def rejection(path: Path, holder: Holder | None, hint: str) -> RecipeError:
    """The error of a process that finds another live one, or itself, in the directory of the lock file *path*."""
    if holder is not None and holder.is_this_process():
        return HeldByThisProcess(
            "this process uses this directory already, in another run or Checkpointer",
            where=path.parent,
            value=_described(holder),
            hint=f"close() the other one, or, if it is lost (in a notebook), restart the process; {hint}",
        )
    return RecipeError(
        "another process is using this directory",
        where=path.parent,
        value=_described(holder),
        hint=hint,
    )


def lost(path: Path, holder: Holder | None) -> LeaseLost:
    """The error of a run if its lock file has the record *holder* of another run, or is gone (None)."""
    return LeaseLost(
        "this run lost the lock on its directory: another run has taken over, or its lock file was removed",
        where=path,
        value=_described(holder),
        hint="this run writes nothing more here. Another run takes over if this one writes no heartbeat for too long: "
        "check what suspended this process or stalled its disk",
    )


def _described(holder: Holder | None) -> str:
    if holder is None:
        return "unknown"
    return f"process {holder.pid} on {holder.host}, running {holder.command}"


# ---------------------------------------------------------------- requests of a save


POLL_SECONDS = 0.2


def is_save_requested(run: Path) -> bool:
    """Whether a save is requested of the run in this directory."""
    return os.path.lexists(run / layout.SAVE_REQUEST)


def answer_save_request(run: Path, checkpoint: str, error: str = "") -> None:
    """Remove the request, and note the name of the *checkpoint* that was saved for it, or the *error*.

    Raises OSError if the request cannot be removed.
    """
    os.unlink(run / layout.SAVE_REQUEST)
    # After the removal, so that a request from here on gets another answer.
    note = {"checkpoint": checkpoint, "error": error, "time": time.time()}
    # On a full disk, the command ends without it.
    with contextlib.suppress(OSError):
        write_note(run / layout.SAVE_ANSWER, note)


def remove_leftover_request(run: Path) -> None:
    """Remove a request that an earlier start did not answer. Called by the owner of the directory."""
    with contextlib.suppress(OSError):
        answer_save_request(run, "", "the run ended before it saved, and was started again")


def request_save(run: Path, notify: Callable[[str], None]) -> Path:
    """Request a save of the run that uses a directory, and wait for it.

    Args:
        run: The run directory.
        notify: Called with a text about the process that is waited for.

    Returns:
        The path of the published checkpoint.

    Raises:
        RecipeError: if no run uses the directory.
        SaveFailed: if the run ended first, or could not save.
        OSError: if the directory cannot be written.
    """
    lock = run / layout.LOCK_FILE
    before, holder = read_note(run, layout.SAVE_ANSWER), read_holder(lock)
    if _has_ended(lock, holder):
        raise RecipeError(
            "no run uses this directory",
            where=run,
            value="",
            hint="specify the checkpoint_dir of a running job; if its nodes share no storage, on the node of rank 0",
        )
    # Not followed if it is a link: the directory is not trusted.
    os.close(open_lock_file(run / layout.SAVE_REQUEST, os.O_WRONLY | os.O_CREAT))
    if holder is not None:
        notify(f"waiting for the next step of process {holder.pid} on {holder.host}")
    seen_at, limit = time.monotonic(), usual_watch_seconds(run)
    while True:
        now = read_holder(lock)
        # Once the request is gone, only an answer counts, of which there may be none (see answer_save_request()).
        if now != holder and is_save_requested(run):
            holder, seen_at = now, time.monotonic()
        # Before the answer is read, which a run writes before it ends.
        error = "the run ended before it saved" if _has_ended(lock, now) else ""
        if time.monotonic() - seen_at > limit:
            error = error or "the run does not respond"
        found = read_note(run, layout.SAVE_ANSWER)
        if found != before:
            break
        if error:
            found = {"error": error}
            break
        time.sleep(POLL_SECONDS)
    if found.get("checkpoint"):
        return run / str(found["checkpoint"])
    raise SaveFailed(
        "nothing was saved",
        where=run,
        value=str(found.get("error", "")),
        hint=f"see the end of {run / layout.TEXT_LOG}",
    )


def _has_ended(lock: Path, holder: Holder | None) -> bool:
    """Whether the run with the lock file *lock* has ended, as far as it is certain."""
    if holder is None:
        # It may be unreadable for a moment.
        return not os.path.lexists(lock)
    return holder.has_ended(-1, is_locked=False)
