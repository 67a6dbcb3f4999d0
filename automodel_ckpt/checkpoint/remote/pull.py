"""Download a checkpoint: its files in parallel into a staging directory, verified, and published as a save is."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.base.store_url import public
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.export.export_manifest import complete_exports, export_problems
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote.exports import exported_files
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run.maintenance import without_optimizer
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

LOGS = (layout.TRAINING_LOG, layout.VALIDATION_LOG, layout.TIMELINE_LOG)
"""The logs of a run that are uploaded with each checkpoint."""
_POLL_SECONDS = 0.2
"""How often a download checks whether it was stopped."""


def pull_checkpoint(
    run: RemoteRun,
    name: str,
    root: Path,
    *,
    num_threads: int = 8,
    on_file: Callable[[str], None] = lambda name: None,
    with_exports: bool = False,
    stopping: threading.Event | None = None,
) -> Path:
    """Download the checkpoint *name* into the run directory *root*, and return its path.

    It appears under its name when all its files are there, verified and durable; *with_exports*, also those of its
    complete exports. *on_file* is called with the name of each file of the checkpoint that has arrived. Another thread
    can end the download with *stopping*: it then raises InterruptedError soon. Nothing is left of one that fails.

    Raises:
        CheckpointUnusable: if the store has no complete checkpoint of this name, or its files do not match it or, of an
            export, the export's manifest.
        SaveFailed: if the local disk lacks the space.
        StoreError: if the store fails.
    """
    data, manifest = run.complete_manifest(name)
    exported = exported_files(run, name) if with_exports else {}
    _check_space(root, manifest.nbytes + sum(exported.values()))
    staging = commit.reserve(root, name)
    try:
        transfer = _Transfer(run.store, num_threads, stopping)
        _download(transfer, name, manifest, staging, on_file)
        _download_exports(transfer, name, exported, staging)
        commit.finalize(staging, data)
        return commit.publish(staging, name)
    except BaseException:
        with contextlib.suppress(OSError):
            commit.discard(staging)
        raise


def pull_files(
    run: RemoteRun,
    name: str,
    files: Iterable[str],
    target: Path,
    *,
    num_threads: int = 8,
    stopping: threading.Event | None = None,
) -> Path:
    """Download some *files* of the checkpoint *name*, and its manifest, into a new directory of this name in *target*.

    Return the directory, which is not a complete checkpoint. Raises as :func:`pull_checkpoint`.
    """
    data, manifest = run.complete_manifest(name)
    chosen = {file: manifest.files[file] for file in files}
    path = target / name
    path.mkdir()
    only = replace(manifest, files=chosen, trees={}, state={})
    _download(_Transfer(run.store, num_threads, stopping), name, only, path)
    (path / layout.MANIFEST).write_bytes(data)
    return path


def pull_logs(run: RemoteRun, root: Path) -> None:
    """Download the logs of the run to *root*, unless they are there. Raises StoreError."""
    for file in LOGS:
        path = root / file
        if not os.path.lexists(path):
            with contextlib.suppress(FileNotFoundError):
                # By a rename: a crash leaves no torn log.
                replace_file(path, run.store.read(file))


def pull_weights(
    run: RemoteRun,
    name: str | None,
    target: Path,
    *,
    num_threads: int = 8,
    stopping: threading.Event | None = None,
) -> Path:
    """Download the models of the checkpoint *name* into a new directory in *target*, and return it.

    It is a checkpoint without the state of optimizers. Without a *name*, all files at the URL of *run* are downloaded:
    a model that another program wrote, or an export. Raises as :func:`pull_checkpoint`.
    """
    transfer = _Transfer(run.store, num_threads, stopping)
    if name is None:
        return _pull_directory(transfer, target)
    _, whole = run.complete_manifest(name)
    manifest = without_optimizer(whole)
    _check_space(target, manifest.nbytes)
    path = target / name
    path.mkdir()
    _download(transfer, name, manifest, path)
    (path / layout.MANIFEST).write_bytes(manifest.to_bytes())
    return path


class _Transfer:
    """The download of some files from *store*, which ends soon when *stopping* is set, or when it is interrupted."""

    def __init__(self, store: Store, num_threads: int, stopping: threading.Event | None) -> None:
        self.store = store
        self._num_threads = num_threads
        self._stopping = stopping
        self._has_failed = False
        self._creating = threading.Lock()
        """Held while a file is created, so that none is after a failure: its directory is removed then."""

    def each(self, fetch: Callable[[str], None], files: Iterable[str]) -> None:
        """Call *fetch* with each of the *files*, in several threads. Raises the first failure, or InterruptedError."""
        pool = ThreadPoolExecutor(self._num_threads, "pull")
        try:
            pending: set[Future[None]] = {pool.submit(fetch, file) for file in files}
            while pending:
                self.check()
                done, pending = wait(pending, _POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for each in done:
                    each.result()
        except BaseException:
            # Also StoppedWaiting. Requests in progress are not waited for: they may take minutes. Their threads write
            # nothing more, and end.
            with self._creating:
                self._has_failed = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def file(self, name: str, path: Path, size: int) -> None:
        """Download the object *name* to *path*. Raises InterruptedError after a stop."""
        with self._creating:
            self.check()
            path.parent.mkdir(parents=True, exist_ok=True)
            created = DurableFile(path, nbytes=size)
        try:
            with created as file:

                def write(block: bytes) -> None:
                    self.check()
                    file.write(block)

                self.store.stream(name, write)
                file.close()
        except FileNotFoundError:
            raise CheckpointUnusable(
                "a file of the checkpoint is missing in the store",
                where=f"{self.store}/{name}",
                value="",
                hint="the checkpoint may have been removed meanwhile: try again",
            ) from None

    def check(self) -> None:
        """Raise InterruptedError after a stop."""
        if self._has_failed or (self._stopping is not None and self._stopping.is_set()):
            raise InterruptedError("the download was stopped")


def _pull_directory(transfer: _Transfer, target: Path) -> Path:
    """Download all objects below the URL of the store into a new directory in *target*."""
    store = transfer.store
    sizes = store.sizes()
    if not sizes:
        raise CheckpointUnusable(
            "the store has nothing at this URL",
            where=str(store),
            value="no objects",
            hint="check the URL; `ckpt ls URL` lists the checkpoints of a run",
        )
    _check_space(target, sum(sizes.values()))
    path = target / public(store.url).rpartition("/")[2]
    path.mkdir()
    _fetch_all(transfer, "", sizes, path)
    return path


def _download_exports(
    transfer: _Transfer, name: str, sizes: Mapping[str, int], target: Path
) -> None:
    """Download the exports of a checkpoint, whose files have *sizes*, into the checkpoint's directory *target*.

    They are verified by their manifests. Raises :class:`CheckpointUnusable`.
    """
    _fetch_all(transfer, f"{name}/", sizes, target)
    problems = []
    for export in complete_exports(target):
        problems += export_problems(export)
    if problems:
        hint = "download the checkpoint without its exports (--no-exports), or push it again"
        raise CheckpointUnusable.all_of([replace(each, hint=hint) for each in problems])


def _fetch_all(transfer: _Transfer, prefix: str, sizes: Mapping[str, int], target: Path) -> None:
    """Download the objects that *sizes* names, below *prefix* in the store, into the directory *target*.

    Raises :class:`CheckpointUnusable` for a name that is no file in *target*.
    """
    for file in sizes:
        if reason := layout.unsafe_path(file):
            raise CheckpointUnusable(
                f"an object cannot be a file: {reason}",
                where=str(transfer.store),
                value=f"{prefix}{file}",
                hint="remove it, or use another URL",
            )

    def fetch(file: str) -> None:
        transfer.file(f"{prefix}{file}", target / file, sizes[file])

    transfer.each(fetch, sizes)


def _download(
    transfer: _Transfer,
    name: str,
    manifest: Manifest,
    target: Path,
    on_file: Callable[[str], None] = lambda file: None,
) -> None:
    """Download the files of *manifest* into *target*, and verify them. Raises :class:`CheckpointUnusable`."""

    def fetch(file: str) -> None:
        transfer.file(f"{name}/{file}", target / file, manifest.files[file].size)
        on_file(file)

    transfer.each(fetch, manifest.files)
    problems = verify(target, manifest, "digest")
    if problems:
        raise CheckpointUnusable.all_of(problems)


def _check_space(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise SaveFailed(
            "the disk lacks the space for the checkpoint",
            where=str(directory),
            value=f"{size_text(nbytes)} needed, {size_text(free)} free",
            hint="free disk space, or choose another directory",
        )
