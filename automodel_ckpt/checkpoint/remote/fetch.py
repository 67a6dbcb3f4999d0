"""What a start of a run gets from a store: the checkpoint to resume from, and the logs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from automodel_ckpt.base.store_url import is_url, public
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.options import RemoteOptions
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Summary
from automodel_ckpt.checkpoint.remote.locate import locate_checkpoint
from automodel_ckpt.checkpoint.remote.parts import only
from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint, pull_files, pull_logs
from automodel_ckpt.checkpoint.remote.run import RemoteCheckpoint, RemoteRun
from automodel_ckpt.checkpoint.run import links, resume
from automodel_ckpt.checkpoint.run.links import (
    DIRECTORY,
    options_for,
    own_name,
    remove_fetched,
)
from automodel_ckpt.checkpoint.run.notes import GoneBack
from automodel_ckpt.checkpoint.run.resume import Record
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from automodel_ckpt.errors import CheckpointUnusable

log = logging.getLogger("automodel_ckpt")

_NUM_THREADS = 8
_KEY = "checkpoint.remote"


@dataclass(frozen=True)
class Fetched:
    """A checkpoint of a store that is loaded once, from the local directory *path*.

    If it *is_streamed*, the directory has only the files without tensors, and each rank reads what it needs of the
    others from the run at *url*, which is opened with *options*.
    """

    path: Path
    url: str
    is_streamed: bool
    options: Values = field(default_factory=dict)
    num_threads: int = _NUM_THREADS

    @property
    def name(self) -> str:
        """Where the checkpoint is, for logs."""
        return f"{public(self.url)}/{self.path.name}"

    def stored_locally(self, manifest: Manifest) -> Manifest:
        """Restrict the *manifest* of the checkpoint to the files that are in the local directory."""
        if not self.is_streamed:
            return manifest
        remote = manifest.files_with_tensors
        files = {name: each for name, each in manifest.files.items() if name not in remote}
        return only(manifest, files)

    def bring(self, root: Path) -> None:
        """Download the files of the local directory to another node's directory, with the run directory *root*.

        Raises :class:`StoreError`, and what :func:`~.pull.pull_files` raises.
        """
        remove_fetched(root)
        run = RemoteRun(Store(self.url, self.options, where=_KEY))
        _pull_files_without_tensors(run, self.path.name, root, self.num_threads)

    def ranges(self, manifest: Manifest) -> VerifiedRanges | None:
        """Open the other files, to read them by byte ranges. Returns None when there are none."""
        if not self.is_streamed:
            return None
        store = Store(self.url, self.options, where=_KEY)
        return VerifiedRanges(
            store, self.path.name, manifest.trees.values(), num_threads=self.num_threads
        )


class Fetcher:
    """Fetches the checkpoint to resume from, and the logs, for the run in *root*. Only rank 0 uses it.

    *settings* is the section ``checkpoint.remote``; without it, only ``restore_from`` can name a store.
    """

    def __init__(self, root: Path, settings: RemoteOptions | None) -> None:
        self._root, self._settings = root, settings
        self.stopping = threading.Event()
        """Ends a download in progress when it is set, by another thread."""
        self.always_streams = False
        """Whether nothing is downloaded whole: the ranks of other nodes do not see *root*."""
        self._run: RemoteRun | None = None
        if settings is not None:
            self._run = RemoteRun(Store(settings.url, settings.options, where=_KEY))

    def fetch(self, restore_from: str | None, memory: Path | None = None) -> Fetched | None:
        """Fetch the checkpoint to resume from, if a store has it and the run directory does not.

        With *restore_from*, this is the checkpoint that it names. Otherwise, it is the newest one, if it is newer than
        the checkpoints of the run directory. It is downloaded into the run directory if the disk has the space, and
        else returned. A checkpoint of another run is returned, too. *memory* is the directory of the run's memory
        checkpoints.

        A store of the run that cannot be read is a warning if there is a local checkpoint. Raises :class:`StoreError`
        otherwise, and what :func:`~.pull.pull_checkpoint` raises.
        """
        remove_fetched(self._root)
        found = self.find(restore_from, memory)
        fetched = None if found is None else self._bring(*found)
        if found is not None and found[0] is self._run:
            pull_logs(found[0], self._root)
        had_nodes = self.always_streams or (self._root / layout.GENERATION).exists()
        if found is None and self._run is not None and had_nodes:
            # Another node had the logs, and the checkpoint is on the disks of the nodes, which does not need them.
            with contextlib.suppress(StoreError):
                pull_logs(self._run, self._root)
        return fetched

    def fetch_up_to(self, step: int, memory: Path | None = None) -> Fetched | None:
        """Fetch the newest checkpoint of *step* or an earlier one, if the store of the run has it and *root* does not.

        For a run that goes back while it trains: it keeps its logs. *memory* and the returned value are as for
        :meth:`fetch`. A store that cannot be read is a warning.
        """
        remove_fetched(self._root)
        local = resume.newest(self._root, memory, step)
        if self._run is None or (local is not None and local.step == step):
            return None
        try:
            found = _newest(self._run, self._root, step)
            if found is None or (local is not None and local.step >= found.name.step):
                return None
            return self._bring(self._run, str(found.name))
        except (StoreError, CheckpointUnusable) as error:
            log.warning(
                "checkpoints in the store are not used to go back to step %d: %s", step, error
            )
            return None

    def expected(self, restore_from: str | None, memory: Path | None = None) -> Summary | None:
        """Read the summary of the checkpoint that :meth:`fetch` would fetch. Returns None when it would fetch none.

        Raises as :meth:`fetch`.
        """
        found = self.find(restore_from, memory)
        if found is None:
            return None
        run, name = found
        data = run.manifest(name)
        return None if data is None else Summary.parse(data, f"{run.store}/{name}")

    def find(
        self, restore_from: str | None, memory: Path | None = None
    ) -> tuple[RemoteRun, str] | None:
        """Find the checkpoint that :meth:`fetch` fetches: its run and its name.

        Returns None when it is in the run directory, or in no store. Also returns None, with a warning, when the store
        cannot be read and a local checkpoint is the one to resume from, as far as this can be known without the store.
        Raises :class:`StoreError`, and :class:`CheckpointUnusable` if *restore_from* is the URL of no checkpoint.
        """
        name = own_name(restore_from, self._settings)
        is_elsewhere = name is not None and is_url(name)
        is_continued = name is not None and is_elsewhere and resume.is_continued(self._root, name)
        newest = resume.newest(self._root, memory)
        try:
            if self._run is not None:
                found = _wanted(self._run, self._root, name, newest)
                if found is not None:
                    return self._run, str(found.name)
            if name is None or not is_elsewhere or is_continued:
                return None
            options = options_for(name, self._settings)
            return locate_checkpoint(name, options, where="checkpoint.restore_from")
        except StoreError as error:
            if not (is_continued if is_elsewhere else newest is not None):
                raise
            log.warning("the store cannot be read, resuming from the local disk: %s", error)
            return None

    def _bring(self, run: RemoteRun, name: str) -> Fetched | None:
        """Download the checkpoint *name*, or the files of it without tensors if the disk lacks the space."""
        root, is_own = self._root, run is self._run
        num_threads = _NUM_THREADS if self._settings is None else self._settings.num_threads
        _, manifest = run.complete_manifest(name)
        # For the checkpoint, and for the next one, which is saved before it is removed.
        free = shutil.disk_usage(root).free
        is_streamed = self.always_streams or free < 2 * manifest.nbytes
        started = time.monotonic()
        if is_streamed:
            message = "%s/%s is not downloaded, each rank reads what it needs (%s; %s free in %s)"
            sizes = size_text(manifest.nbytes), size_text(free)
            log.info(message, run.store, name, *sizes, root)
            path = _pull_files_without_tensors(run, name, root, num_threads, self.stopping)
        else:
            if is_own and os.path.lexists(root / name):
                links.make_room(root / name)
            target = root if is_own else root / DIRECTORY
            target.mkdir(exist_ok=True)
            log.info("downloading %s from %s", name, run.store)
            path = pull_checkpoint(
                run, name, target, num_threads=num_threads, stopping=self.stopping
            )
            seconds = time.monotonic() - started
            log.info("downloaded %s: %.1f MB in %.1f s", name, manifest.nbytes / 1e6, seconds)
        if path.parent == root:
            return None
        options = options_for(run.store.url, self._settings)
        return Fetched(path, run.store.url, is_streamed, options, num_threads)


def _pull_files_without_tensors(
    run: RemoteRun,
    name: str,
    root: Path,
    num_threads: int,
    stopping: threading.Event | None = None,
) -> Path:
    _, manifest = run.complete_manifest(name)
    files = manifest.files.keys() - manifest.files_with_tensors
    target = root / DIRECTORY
    target.mkdir()
    return pull_files(run, name, files, target, num_threads=num_threads, stopping=stopping)


def _wanted(
    run: RemoteRun, root: Path, restore_from: str | None, local: Record | None
) -> RemoteCheckpoint | None:
    """Return the checkpoint of *run* to resume from, or None when it is in the run directory *root*, or in no store.

    *local* is the newest checkpoint there. As in a run directory, *restore_from* applies until the run has saved a
    newer checkpoint under the same request.
    """
    newest = _newest(run, root)
    if newest is not None and local is not None and local.step >= newest.name.step:
        newest = None
    if restore_from is None or restore_from == layout.LATEST:
        return newest
    if newest is not None:
        noted = newest.summary.lineage.get("restore_from")
        if noted is not None and noted == resume.request_text(root, restore_from):
            return newest
    name: str | None = restore_from
    if restore_from == layout.LOWEST_VAL:
        name = None if local is not None else run.pointed(layout.LOWEST_VAL)
    parsed = None if name is None else layout.parse_checkpoint_name(name)
    if parsed is None or os.path.lexists(root / str(parsed)):
        return None
    return run.checkpoint(parsed)


def _newest(run: RemoteRun, root: Path, newest_step: int | None = None) -> RemoteCheckpoint | None:
    """Return the newest checkpoint of *run*, without those that the run in *root* abandoned.

    With *newest_step*, later steps are left out.
    """
    record = GoneBack.read(root)
    owner = None if record is None else run.owner()
    if record is not None and owner is not None and record.is_outdated(owner):
        record = None
    limits = [math.inf if newest_step is None else newest_step]
    if record is not None:
        limits.append(record.step)
    return next((each for each in run.checkpoints() if each.name.step <= min(limits)), None)
