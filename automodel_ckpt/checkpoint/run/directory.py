"""A run's directory: its lock, its pointers, and which of its checkpoints are kept.

Only rank 0 writes here; no collective is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import commit, layout, policy
from automodel_ckpt.checkpoint.export_leftovers import clear_checkpoint
from automodel_ckpt.checkpoint.failures import RETRY
from automodel_ckpt.checkpoint.run import late_validations, links, resume
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.errors import os_problem

log = logging.getLogger("automodel_ckpt")

_NOT_RANKED = "LOWEST_VAL will not point to this checkpoint unless it is validated again"


class RunDirectory:
    """The directory *path* (as the user wrote it, for messages), kept by *keep* and ranked by *metric_key*."""

    def __init__(self, path: Path, keep: policy.KeepPolicy, metric_key: str) -> None:
        self.path = path
        self._keep, self._metric_key = keep, metric_key
        self._lease: Lease | None = None
        self._made = False
        self._removals: list[threading.Thread] = []
        self._known: resume.Known = {}
        self._pointers_are_behind = False
        self.went_back_to: int | None = None
        """The step of the checkpoint that the run went on from, until its next one is published."""

    @property
    def root(self) -> Path:
        """The absolute path of the run directory."""
        return self.path.absolute()

    def display_path(self, checkpoint: Path) -> Path:
        """A checkpoint's path as the user wrote the run directory."""
        return self.path / checkpoint.name if checkpoint.parent == self.root else checkpoint

    def sibling(self) -> RunDirectory:
        """The run directory beside this one for the checkpoints of a different model."""
        return RunDirectory(layout.sibling(self.path), self._keep, self._metric_key)

    # ---------------------------------------------------------------- who writes here

    def hold(self) -> None:
        """Lock the directory for this run, and create it at the first call; a deleted directory is not created again.

        Raises :class:`RecipeError` where another live run holds it, :class:`LeaseLost` where one took over since the
        first call, OSError where it cannot be written.
        """
        if self._lease is not None:
            self._lease.check()
            return
        if not self.root.is_dir():
            commit.make_run_directory(self.root)
            self._made = True
        self._lease = Lease(self.root)
        if (before := self._lease.taken_over) is not None:
            message = "taking over %s from process %d on %s, which did not release it"
            log.info(message, self.path, before.pid, before.host)

    @property
    def is_lost(self) -> bool:
        """Whether it is known that another run took over this directory. Reads no file."""
        return self._lease is not None and self._lease.is_lost

    @property
    def lease_token(self) -> tuple[Path, str] | None:
        """What another process of this run needs to check the lease; None where this process does not hold it."""
        return self._lease.token if self._lease is not None else None

    def check_lease(self) -> None:
        """Check that this run still holds the directory. Called before every write that others can see.

        Raises :class:`LeaseLost` where another run took over, OSError where that cannot be determined.
        """
        if self._lease is not None:
            self._lease.check()

    def release(self) -> None:
        """Release the lock. A directory that this object created is removed if it is empty."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._made:
            with contextlib.suppress(OSError):
                os.rmdir(self.root)  # only where nothing came into it

    # ---------------------------------------------------------------- pointers

    def candidates(self, restore_from: str | None) -> resume.Request:
        """The checkpoints to resume from, in order, after leftovers are removed and pointers are repaired."""
        if self.root.is_dir():
            self.hold()
            for name in commit.recover(self.root):
                log.info("Removed the leftover of an unfinished save: %s", self.path / name)
            for entry in sorted(os.scandir(self.root), key=lambda entry: entry.name):
                if layout.is_checkpoint(entry.name) and entry.is_dir(follow_symlinks=False):
                    clear_checkpoint(self.root / entry.name, log.info)
            links.repair_links(self.root)
            self._repair_pointers()
        return resume.candidates(self.root, restore_from)

    def best(self) -> str | None:
        """The name of the checkpoint that LOWEST_VAL points to."""
        return commit.pointed(self.root, layout.LOWEST_VAL)

    def publish(
        self, staging: Path, name: layout.CheckpointName, losses: Mapping[str, Any]
    ) -> None:
        """Rename a finalized checkpoint to its final name and update the pointers.

        *losses* are those of the checkpoint's own step, if it was validated. After a resume from an earlier step, the
        checkpoints of later steps are first set aside. Raises OSError where it could not be published,
        :class:`LeaseLost` where another run took over this directory.
        """
        self.check_lease()
        if self.went_back_to is not None:
            step, self.went_back_to = self.went_back_to, None
            self._set_aside_after(step)
            self.check_lease()
        if os.path.lexists(self.root / str(name)):
            # A file or a link that is no checkpoint: the save must not fail here at every start.
            aside = links.set_aside(self.root, str(name))
            log.warning(
                "%s has the name of a new checkpoint; renamed to %s", self.path / str(name), aside
            )
        path = commit.publish(staging, str(name))
        with contextlib.suppress(OSError):  # then it is read when it is asked for
            metric = policy.metric_of(losses, self._metric_key)
            self._known[str(name)] = (
                resume.stamp(path),
                policy.Record(str(name), name.step, name.epoch, metric),
            )
        self._point(str(name))

    def _point(self, newest: str) -> None:
        """Update LOWEST_VAL if another checkpoint is the best now, then LATEST.

        In this order, a LATEST that names the newest checkpoint shows at the next start that LOWEST_VAL is up to date.
        """
        behind, self._pointers_are_behind = self._pointers_are_behind, True
        try:
            self.check_lease()
            self._point_to_best(None if behind else newest)
            commit.point(self.root, layout.LATEST, newest)
            self._pointers_are_behind = False
        except OSError as error:
            # The checkpoint itself is safe, and the next start mends the pointers.
            log.warning(
                "%s", os_problem(error, "could not update LATEST and LOWEST_VAL", hint=RETRY)
            )

    def _repair_pointers(self) -> None:
        """Update the pointers of a run that was killed between publishing a checkpoint and updating them."""
        newest = next(self._records(), None)
        if newest is None:
            return
        before = commit.pointed(self.root, layout.LATEST)
        is_behind = before != newest.name
        self._warn_of_going_back(before, newest.name)
        self._point_to_best(None if is_behind else newest.name)
        if is_behind:
            commit.point(self.root, layout.LATEST, newest.name)

    def _warn_of_going_back(self, before: str | None, newest: str) -> None:
        """Warn where LATEST named a later checkpoint that is incomplete or missing: training will repeat steps."""
        named = layout.parse_checkpoint_name(before) if before is not None else None
        now = layout.parse_checkpoint_name(newest)
        if named is not None and now is not None and named > now:
            message = "LATEST pointed to %s, which is not a complete checkpoint any more; it now points to %s"
            log.warning(message, self.path / str(named), newest)

    def note_validation(self, name: str, digest: str, losses: Mapping[str, Any]) -> None:
        """Record the losses of a validation that ran after the checkpoint *name* was published.

        *digest* is that of its manifest. Raises :class:`LeaseLost`.
        """
        try:
            self.check_lease()
            late_validations.note(self.root / name, digest, losses)
            self._known.pop(name, None)
            self._point_to_best(None if self._pointers_are_behind else name)
        except OSError as error:
            self._pointers_are_behind = True
            log.warning(
                "%s",
                os_problem(error, f"could not record the validation of {name}", hint=_NOT_RANKED),
            )

    def _point_to_best(self, changed: str | None) -> None:
        """Update LOWEST_VAL.

        *changed* is the only checkpoint whose metric changed, so that only it is compared with the current best. With
        None, or without a current best, all checkpoints are compared.
        """
        before, mode = self.best(), self._keep.mode
        standing = self._metric_of(before) if changed is not None else None
        if standing is not None and policy.is_better(self._metric_of(changed), standing, mode):
            best = changed
        elif standing is not None:
            best = before
        else:
            record = policy.best(self._records(), mode)
            best = record.name if record else None
        if best is None:
            commit.unpoint(self.root, layout.LOWEST_VAL)
        elif best != before:
            commit.point(self.root, layout.LOWEST_VAL, best)

    def _metric_of(self, name: str | None) -> float | None:
        """The metric that ranks a checkpoint; None where it is missing, damaged, or was not validated at its step."""
        if name is None:
            return None
        record = resume.record(self.root, name, self._metric_key, self._known)
        return record.metric if record is not None else None

    def _records(self) -> Iterator[policy.Record]:
        return resume.records(self.root, self._metric_key, self._known)

    # ---------------------------------------------------------------- what stays

    def _set_aside_after(self, step: int) -> None:
        """Rename the checkpoints after *step*, from which the run resumed; they are kept as superseded."""
        abandoned = [name for name in resume.checkpoint_names(self.root) if name.step > step]
        if self.best() in {str(name) for name in abandoned}:
            # A new checkpoint may soon have that name; the best of what is left is looked for after it.
            commit.unpoint(self.root, layout.LOWEST_VAL)
        for name in abandoned:
            aside = links.set_aside(self.root, str(name))
            log.warning("Renamed the abandoned checkpoint %s to %s", self.path / str(name), aside)

    def prune(self, just_saved: str) -> tuple[str, ...]:
        """Remove the checkpoints that the keep policy does not keep; return their names.

        Files are deleted in a thread. Failures are only logged, so that they never stop training.
        """
        if self._keep.last is None:
            return ()
        try:
            records = [*self._records()]
            protected = links.protected_names(self.root) | {just_saved}
            if self._pointers_are_behind and (best := policy.best(records, self._keep.mode)):
                protected.add(best.name)  # LOWEST_VAL is yet to name it
            removable = self._keep.removable(records, protected)
        except OSError as error:
            log.warning(
                "%s", os_problem(error, "could not list the checkpoints to remove", hint=RETRY)
            )
            return ()
        withdrawn = {}
        for record in removable:
            trash = self._withdraw(record.name)
            if trash is not None:
                withdrawn[record.name] = trash
        if withdrawn:
            thread = threading.Thread(
                target=_discard, args=(withdrawn.values(),), name="prune", daemon=True
            )
            thread.start()
            self._removals = [t for t in self._removals if t.is_alive()] + [thread]
        return tuple(withdrawn)

    def _withdraw(self, name: str) -> Path | None:
        """Rename a checkpoint to a trash directory, which is returned; None where it is kept. Raises
        :class:`LeaseLost`.
        """
        try:
            self.check_lease()
            return links.withdraw_unprotected(self.root, name)
        except OSError as error:
            log.warning(
                "%s",
                os_problem(
                    error, f"could not remove {name}", hint="it is retried after the next save"
                ),
            )
            return None

    def wait(self) -> None:
        """Wait until no removal is in progress."""
        for thread in self._removals:
            thread.join()
        self._removals = []


def _discard(paths: Iterable[Path]) -> None:
    for path in paths:
        commit.discard(path)
