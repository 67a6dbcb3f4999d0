"""Requests that the run that uses a directory saves now.

A request is an empty file in the directory, which rank 0 looks for between steps; a note has the outcome. Who requests
a save while another request waits gets the same answer. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.base.durable_io import open_lock_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.run.lease import Holder, read_holder, usual_watch_seconds
from automodel_ckpt.checkpoint.run.notes import read_note, write_note
from automodel_ckpt.errors import RecipeError, SaveFailed

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
