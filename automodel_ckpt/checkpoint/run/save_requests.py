"""Request a save of the run that uses a directory.

A request is an empty file in the directory. Rank 0 looks for it between steps, once a second (``training/saves``), and
:class:`~automodel_ckpt.checkpoint.run.directory.RunDirectory` answers it by a note. Who requests a save while another
request waits gets the same answer. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.base.durable_io import open_lock_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.run.lease import Holder, read_holder, usual_watch_seconds
from automodel_ckpt.checkpoint.run.notes import read_note
from automodel_ckpt.errors import RecipeError, SaveFailed

POLL_SECONDS = 0.2


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
        # Once the request is gone, only an answer counts. There may be none: the run's disk can be full.
        if now != holder and os.path.lexists(run / layout.SAVE_REQUEST):
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
        where=run / layout.TEXT_LOG,
        value=str(found.get("error", "")),
        hint="",
    )


def _has_ended(lock: Path, holder: Holder | None) -> bool:
    """Whether the run with the lock file *lock* has ended, as far as it is certain."""
    if holder is None:
        # It may be unreadable for a moment.
        return not os.path.lexists(lock)
    return holder.has_ended(-1, is_locked=False)
