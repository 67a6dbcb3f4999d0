"""The directory of a run: its lock, its pointers, and the removal of checkpoints according to the keep policy.

Only rank 0 uses it. No collective is called. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.export.files import clear_checkpoint
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.commit import stamp
from automodel_ckpt.checkpoint.parts.failures import NEXT_SAVE, as_failure
from automodel_ckpt.checkpoint.run import links, resume
from automodel_ckpt.checkpoint.run.lease import RUN_HINT, HeldByThisProcess, Lease
from automodel_ckpt.checkpoint.run.notes import note_losses, write_note
from automodel_ckpt.checkpoint.run.resume import (
    KeepPolicy,
    Record,
    best_record,
    is_better,
    metric_of,
)
from automodel_ckpt.errors import LeaseLost, RecipeError, os_problem

log = logging.getLogger("automodel_ckpt")

OPENING = "opening checkpoint.checkpoint_dir"
_NAME_ANOTHER = "name another directory"
_NOT_RANKED = "LOWEST_VAL will not point to this checkpoint unless it is validated again"


class RunDirectory:
    """Manages the run directory *path*, as the user wrote it. *metric_key* ranks the checkpoints."""

    def __init__(self, path: Path, keep: KeepPolicy, metric_key: str) -> None:
        self.path = path
        # The program may change its working directory later.
        self.root = path.absolute()
        """The absolute path of the run directory."""
        self._keep = keep
        self._metric_key = metric_key
        self._lease: Lease | None = None
        self._was_created = False
        self._removals: list[threading.Thread] = []
        self._known: resume.Known = {}
        self.on_published: Callable[[str], None] = lambda name: None
        """Called with the name of each published checkpoint, before others are removed."""
        self.on_exported: Callable[[str], None] = lambda name: None
        """Called with the name of a checkpoint when an export of it is complete."""
        self.memory: Path | None = None
        """The directory of the memory checkpoints of this run."""
        self.went_back_to: int | None = None
        """The step of the checkpoint that the run resumed from, until the next checkpoint is published."""

    def display_path(self, checkpoint: Path) -> Path:
        """Return a checkpoint's path relative to the run directory as the user wrote it."""
        if checkpoint.parent != self.root:
            return checkpoint
        return self.path / checkpoint.name

    def sibling(self) -> RunDirectory:
        """Return the run directory next to this one for the checkpoints of another model."""
        return RunDirectory(layout.sibling(self.path), self._keep, self._metric_key)

    # ---------------------------------------------------------------- the lease

    def hold(self, hint: str = RUN_HINT) -> None:
        """Lock the directory for this run. The first call creates it; a directory deleted since is not created again.

        Raises :class:`RecipeError` if another live run has locked it (with *hint*), or if it is a link to nothing
        or inside of a checkpoint; :class:`LeaseLost` if another run took over since the first call; OSError if it
        cannot be written.
        """
        if self._lease is not None:
            self._lease.check()
            return
        check_links(self.path)
        check_outside_checkpoints(self.path)
        if not self.root.is_dir():
            commit.make_run_directory(self.root)
            self._was_created = True
        try:
            self._lease = Lease(self.root, hint=hint)
        except HeldByThisProcess:
            # By an object that nothing refers to any more: its finalizer releases the directory.
            gc.collect()
            self._lease = Lease(self.root, hint=hint)
        before = self._lease.taken_over
        if before is not None:
            message = "taking over %s from process %d on %s, which did not release it"
            log.info(message, self.path, before.pid, before.host)

    @property
    def is_lost(self) -> bool:
        """Whether this process has detected that another run took over the directory. Reads no file."""
        return self._lease is not None and self._lease.is_lost

    @property
    def lease_token(self) -> tuple[Path, str] | None:
        """The lock file and its token, with which another process of this run checks the lease, if it is held."""
        return None if self._lease is None else self._lease.token

    def check_lease(self) -> None:
        """Check that this run still owns the directory. Called before every write that other programs can see.

        Raises :class:`LeaseLost` if another run took over, OSError if that cannot be determined.
        """
        if self._lease is not None:
            self._lease.check()

    def release(self) -> None:
        """Release the lock. A directory that this object created is removed if it is empty."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._was_created:
            with contextlib.suppress(OSError):
                os.rmdir(self.root)  # fails unless the directory is empty

    # ---------------------------------------------------------------- requests of ckpt save

    @property
    def save_is_requested(self) -> bool:
        """Whether ``ckpt save`` waits for a save of this run."""
        return os.path.lexists(self.root / layout.SAVE_REQUEST)

    def answer_save_request(self, checkpoint: str, error: str = "") -> None:
        """Remove the request, and note the name of the *checkpoint* that was saved for it, or the *error*.

        Raises :class:`LeaseLost`, and OSError if the request cannot be removed.
        """
        self.check_lease()
        os.unlink(self.root / layout.SAVE_REQUEST)
        # After the removal, so that a request from here on gets another answer.
        note = {"checkpoint": checkpoint, "error": error, "time": time.time()}
        # On a full disk, the command ends without it.
        with contextlib.suppress(OSError):
            write_note(self.root / layout.SAVE_ANSWER, note)

    def remove_leftover_request(self) -> None:
        """Remove a request that an earlier start did not answer."""
        # A lost lease is raised by the next write.
        with contextlib.suppress(OSError, LeaseLost):
            self.answer_save_request("", "the run ended before it saved, and was started again")

    # ---------------------------------------------------------------- pointers

    def candidates(self, restore_from: str | None, fetched: Path | None = None) -> resume.Request:
        """Remove leftovers, repair the pointers, and list the checkpoints to resume from, in order.

        *fetched* is a checkpoint that was fetched from a store to be loaded, and the only one then.
        """
        if self.root.is_dir():
            # The lease comes first: a staging directory may belong to a live save of another run.
            self.hold()
            for name in commit.recover(self.root):
                log.info("Removed the leftover of an unfinished save: %s", self.path / name)
            for entry in sorted(os.scandir(self.root), key=lambda entry: entry.name):
                if layout.is_checkpoint(entry.name) and entry.is_dir(follow_symlinks=False):
                    clear_checkpoint(self.root / entry.name, log.info)
            links.repair_links(self.root)
            self._repair_pointers()
        if fetched is not None:
            return resume.Request([fetched], by_name=True)
        return resume.candidates(self.root, restore_from, self.memory)

    def best(self) -> str | None:
        """The name of the checkpoint that LOWEST_VAL points to."""
        return commit.pointed(self.root, layout.LOWEST_VAL)

    def continued(self) -> Iterator[str]:
        """Yield the names of the complete checkpoints that the next save continues, newest first.

        Not among them: those that the next save sets aside, because the run went back, and links to other directories.
        """
        for record in self._records():
            is_abandoned = self.went_back_to is not None and record.step > self.went_back_to
            if not is_abandoned and not (self.root / record.name).is_symlink():
                yield record.name

    def publish(self, staging: Path, name: layout.CheckpointName, losses: Values) -> None:
        """Rename a finalized checkpoint to its final name and update the pointers.

        *losses* are the losses of the checkpoint's step, if it was validated. After a resume from an earlier step, the
        checkpoints of later steps are renamed first. Raises OSError if the checkpoint cannot be published,
        :class:`LeaseLost` if another run took over the directory.
        """
        self.check_lease()
        if self.went_back_to is not None:
            self._set_aside_after(self.went_back_to)
            # Only now: after a failure, the next save sets the rest aside.
            self.went_back_to = None
            # Again, because renaming many directories takes time on a network file system.
            self.check_lease()
        if os.path.lexists(self.root / str(name)):
            # A file or a link that is not a checkpoint. It must not make every save of this step fail.
            links.make_room(self.root / str(name))
        path = commit.publish(staging, str(name))
        self.on_published(str(name))
        with contextlib.suppress(
            OSError
        ):  # without this record, it is read from the manifest later
            metric = metric_of(losses, self._metric_key)
            record = Record(str(name), name.step, name.epoch, metric)
            self._known[str(name)] = (stamp(path), record)
        self._point()

    def _point(self) -> None:
        """Update LOWEST_VAL, then LATEST: a LATEST that is current shows the next start that LOWEST_VAL is, too."""
        try:
            self.check_lease()
            self._point_to_best()
            newest = next(self._records(), None)
            if newest is not None and commit.pointed(self.root, layout.LATEST) != newest.name:
                commit.point(self.root, layout.LATEST, newest.name)
        except OSError as error:
            # The checkpoint itself is published, and the next start repairs the pointers.
            problem = os_problem(error, "could not update LATEST and LOWEST_VAL", hint=NEXT_SAVE)
            log.warning("%s", problem)

    def _repair_pointers(self) -> None:
        """Update the pointers of a run that was killed between publishing a checkpoint and updating them."""
        newest = next(self._records(), None)
        if newest is None:
            return
        before = commit.pointed(self.root, layout.LATEST)
        previous = layout.parse_checkpoint_name(before or "")
        if previous is not None and previous.step > newest.step:
            # Training will repeat steps.
            message = "LATEST pointed to %s, which is not a complete checkpoint any more; it now points to %s"
            log.warning(message, self.path / str(previous), newest.name)
        # Without reading the other manifests, which takes 0.1 s for 4 MB, where nothing has changed.
        best = self.best()
        found = resume.record(self.root, best or "", self._metric_key, self._known)
        metric = None if found is None else found.metric
        is_new_best = is_better(newest.metric, metric, self._keep.mode)
        has_lost_best = best is not None and metric is None
        if before != newest.name or is_new_best or has_lost_best:
            self._point()

    def note_validation(self, name: str, digest: str, losses: Values) -> None:
        """Record the losses of a validation that ran after the checkpoint *name* was published.

        *digest* is the manifest's digest. A failed write is logged. Raises :class:`LeaseLost`.
        """
        try:
            self.check_lease()
            note_losses(self.root / name, digest, losses)
            # The manifest is unchanged, so that the cache would ignore this validation.
            self._known.pop(name, None)
            self._point_to_best()
        except OSError as error:
            what = f"could not record the validation of {name}"
            log.warning("%s", os_problem(error, what, hint=_NOT_RANKED))

    def _point_to_best(self) -> None:
        """Update LOWEST_VAL."""
        best = best_record(self._records(), self._keep.mode)
        if best is None:
            commit.unpoint(self.root, layout.LOWEST_VAL)
        elif best.name != self.best():
            commit.point(self.root, layout.LOWEST_VAL, best.name)

    def _records(self) -> Iterator[Record]:
        return resume.records(self.root, self._metric_key, self._known)

    # ---------------------------------------------------------------- removing checkpoints

    def _set_aside_after(self, step: int) -> None:
        """Rename the checkpoints after *step*, from which the run resumed, to superseded ones."""
        abandoned = [name for name in resume.checkpoint_names(self.root) if name.step > step]
        if self.best() in [str(name) for name in abandoned]:
            # A new checkpoint may soon get this name. The best of the others is searched after it is published.
            commit.unpoint(self.root, layout.LOWEST_VAL)
        for name in abandoned:
            aside = links.set_aside(self.root, str(name))
            log.warning("Renamed the abandoned checkpoint %s to %s", self.path / str(name), aside)

    def set_aside_abandoned(self) -> None:
        """Rename the checkpoints after the step that the run went back to, and update the pointers.

        A failure is logged, and the next save tries again. Raises :class:`LeaseLost`.
        """
        if self.went_back_to is None:
            return
        try:
            self.check_lease()
            if any(name.step > self.went_back_to for name in resume.checkpoint_names(self.root)):
                self._set_aside_after(self.went_back_to)
                if next(self._records(), None) is None:
                    commit.unpoint(self.root, layout.LATEST)
                self._point()
            self.went_back_to = None
        except OSError as error:
            what = "could not rename the abandoned checkpoints"
            log.warning("%s", os_problem(error, what, hint=NEXT_SAVE))

    def prune(self, just_saved: str) -> tuple[str, ...]:
        """Remove the checkpoints that the keep policy does not keep, and return their names.

        Files are deleted in a thread. Failures are only logged, so that they never stop training.
        """
        if self._keep.last is None:
            return ()
        try:
            records = list(self._records())
            protected = links.protected_names(self.root) | {just_saved}
            best = best_record(records, self._keep.mode)
            if best is not None:
                # LOWEST_VAL may not point to it, after a failure.
                protected.add(best.name)
            removable = self._keep.removable(records, protected)
        except OSError as error:
            what = "could not list the checkpoints to remove"
            log.warning("%s", os_problem(error, what, hint=NEXT_SAVE))
            return ()
        # Only the renames delay training: a thread deletes the files.
        withdrawn = {}
        for record in removable:
            try:
                self.check_lease()
                trash = links.withdraw_unprotected(self.root, record.name)
            except OSError as error:
                hint = "it is retried after the next save"
                log.warning("%s", os_problem(error, f"could not remove {record.name}", hint=hint))
                continue
            if trash is not None:
                withdrawn[record.name] = trash

        def discard() -> None:
            for path in withdrawn.values():
                commit.discard(path)

        if withdrawn:
            # A daemon thread does not delay the end of the process; the next start deletes what
            # remains.
            thread = threading.Thread(target=discard, name="prune", daemon=True)
            thread.start()
            running = [removal for removal in self._removals if removal.is_alive()]
            self._removals = [*running, thread]
        return tuple(withdrawn)

    def wait(self) -> None:
        """Wait until no removal is in progress."""
        for thread in self._removals:
            thread.join()
        self._removals = []


# ---------------------------------------------------------------- before anything is written


def check_links(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* or one of its parents is a link to nothing."""
    for path in reversed([directory, *directory.parents]):
        # Unlike Path.exists(), this is False and not an error in a directory that cannot be searched.
        if os.path.exists(path):
            continue
        if os.path.islink(path):
            target = os.path.realpath(path)
            raise RecipeError(
                "the run directory is a link to a directory that does not exist",
                where=directory,
                value=f"{path} is a link to {target}, which does not exist",
                hint=_NAME_ANOTHER,
            )
        return


def check_outside_checkpoints(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* is a checkpoint, or inside of one: it would be removed with it."""
    real = Path(os.path.realpath(directory))
    for path in (real, *real.parents):
        if layout.is_checkpoint(path.name) and os.path.lexists(path / layout.MANIFEST):
            raise RecipeError(
                "a run directory cannot be a checkpoint, or be inside of one (see checkpoint.restore_from)",
                where=directory,
                value=f"{path} is a checkpoint",
                hint=_NAME_ANOTHER,
            )


def check_not_a_file(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* exists and is no directory."""
    if directory.exists() and not directory.is_dir():
        raise RecipeError(
            "the run directory is a file",
            where=directory,
            value="not a directory",
            hint=_NAME_ANOTHER,
        )


def check_writable(directory: Path) -> None:
    """Raise :class:`RecipeError` if a run could not create or write *directory*. Writes nothing."""
    check_links(directory)
    check_outside_checkpoints(directory)
    existing = directory.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    code = 0
    if not os.path.isdir(existing):
        code = errno.ENOTDIR
    elif os.statvfs(existing).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif not os.access(existing, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        error = OSError(code, os.strerror(code), str(existing))
        raise as_failure(error, OPENING, directory, RecipeError)
