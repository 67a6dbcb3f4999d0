"""Which checkpoints of a run in a store are removed: by the keep policy of the store, or because an upload ended."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.remote.run import (
    REMOVING,
    SUPERSEDED,
    RemoteCheckpoint,
    RemoteRun,
    record_of,
)
from automodel_ckpt.checkpoint.run.resume import KeepPolicy
from automodel_ckpt.checkpoint.store.transfer import upload_begun


@dataclass(frozen=True)
class IncompleteUpload:
    """A checkpoint in a store without a manifest: its bytes, and when it was last written.

    This is when its newest object was written, or the unfinished upload of a large file began. *written* is in seconds
    since 1970; None: unknown.
    """

    name: str
    nbytes: int
    written: float | None


def removable(
    run: RemoteRun,
    keep: KeepPolicy,
    metric_key: str,
    complete: list[RemoteCheckpoint] | None = None,
) -> list[str]:
    """List the *complete* checkpoints, by default all of them, that *keep* does not keep and no pointer names."""
    if keep.last is None:
        return []
    checkpoints = run.checkpoints() if complete is None else complete
    records = [record_of(each, metric_key) for each in checkpoints]
    protected = [target for target in map(run.pointed, layout.POINTERS) if target is not None]
    return [record.name for record in keep.removable(records, protected)]


def superseded(run: RemoteRun) -> list[str]:
    """List the superseded checkpoints, newest first."""
    return [str(name) for name in run.names() if run.is_superseded(str(name))]


def incomplete(run: RemoteRun) -> list[IncompleteUpload]:
    """List the checkpoints without a manifest, newest first: uploads that are in progress or were interrupted.

    Superseded ones are not listed, nor those that a pointer names. Where no run of this program has written, there are
    none.
    """
    if not run.was_written():
        return []
    pointed = {run.pointed(pointer) for pointer in layout.POINTERS}
    found = []
    for name in map(str, run.names()):
        if name in pointed or run.manifest(name) is not None or run.is_superseded(name):
            continue
        nbytes = sum(run.store.sizes(name).values())
        written = run.store.written(name)
        if written is not None:
            # The object of a large file appears when its last part has arrived.
            written = max(written, upload_begun(run.store, name))
        found.append(IncompleteUpload(name, nbytes, written))
    return found


def prune(run: RemoteRun, keep: KeepPolicy, metric_key: str) -> list[str]:
    """Remove the checkpoints that *keep* does not keep, complete interrupted removals, and return the names."""
    complete = []
    leftovers = []
    # In one pass: each request takes longer than a small checkpoint.
    for each in run.names():
        name = str(each)
        if not run.is_superseded(name):
            found = run.complete(each)
            complete += [] if found is None else [found]
            continue
        with contextlib.suppress(FileNotFoundError):
            marker = run.store.read(f"{name}/{SUPERSEDED}")
            if marker == REMOVING or run.manifest(name) is None:
                leftovers.append(name)
    removed = []
    for name in [*removable(run, keep, metric_key, complete), *leftovers]:
        # A pointer may have been set to it meanwhile.
        with contextlib.suppress(ValueError):
            run.withdraw(name)
            removed.append(name)
    return removed
