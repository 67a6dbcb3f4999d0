"""Download a checkpoint: its files in parallel into a staging directory, verified, and published as a save is."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.export.export_manifest import complete_exports, export_problems
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote.parts import only
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed, unusable

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
    with_exports: bool = False,
    stopping: threading.Event | None = None,
) -> Path:
    """Download the checkpoint *name* into the run directory *root*, and return its path.

    It appears under its name when all its files are there, verified and durable. With *with_exports*, the files of its
    complete exports are there, too. Another thread can end the download with *stopping*: it then raises
    InterruptedError soon. Nothing is left of a download that fails.

    Raises:
        CheckpointUnusable: if the store has no complete checkpoint of this name, or its files do not match it or, of an
            export, the export's manifest.
        SaveFailed: if the local disk lacks the space.
        StoreError: if the store fails.
    """
    data, manifest = run.complete_manifest(name)
    exported = _exported_files(run, name) if with_exports else {}
    check_space(root, manifest.nbytes + sum(exported.values()), "the checkpoint")
    staging = commit.reserve(root, name)
    try:
        _pull_verified(run, name, manifest, staging, num_threads, stopping)
        _download(run.store, f"{name}/", exported, staging, num_threads, stopping)
        problems = [each for path in complete_exports(staging) for each in export_problems(path)]
        hint = "download the checkpoint without its exports (--no-exports), or push it again"
        CheckpointUnusable.check([replace(each, hint=hint) for each in problems])
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
    chosen = only(manifest, {file: manifest.files[file] for file in files})
    path = target / name
    path.mkdir()
    _pull_verified(run, name, chosen, path, num_threads, stopping)
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


def _exported_files(run: RemoteRun, name: str) -> dict[str, int]:
    """List the files of the complete exports that the store has of the checkpoint *name*.

    Return their sizes in bytes by their paths in the checkpoint.
    """
    sizes = run.store.sizes(name)
    exported = {}
    for file, size in sizes.items():
        parts = file.split("/")
        is_exported = len(parts) > 2 and parts[1] in layout.EXPORTS
        if is_exported and f"{parts[0]}/{parts[1]}/{layout.EXPORT_MANIFEST}" in sizes:
            exported[file] = size
    return exported


def _pull_verified(
    run: RemoteRun,
    name: str,
    manifest: Manifest,
    target: Path,
    num_threads: int,
    stopping: threading.Event | None,
) -> None:
    """Download the files of *manifest* into *target*, and verify them. Raises :class:`CheckpointUnusable`."""
    sizes = {file: record.size for file, record in manifest.files.items()}
    _download(run.store, f"{name}/", sizes, target, num_threads, stopping)
    CheckpointUnusable.check(verify(target, manifest, "digest"))


def _download(
    store: Store,
    prefix: str,
    sizes: Mapping[str, int],
    target: Path,
    num_threads: int,
    stopping: threading.Event | None,
) -> None:
    """Download the objects that *sizes* names, below *prefix* in the store, into the directory *target*.

    Ends soon when *stopping* is set, or when it is interrupted. Raises the first failure: :class:`CheckpointUnusable`
    for a missing object or a name that is no file in *target*, InterruptedError after a stop.
    """
    has_failed = threading.Event()
    # Held while a file is created, so that none is after a failure: its directory is removed then.
    creating = threading.Lock()

    def check() -> None:
        if has_failed.is_set() or (stopping is not None and stopping.is_set()):
            raise InterruptedError("the download was stopped")

    def fetch(file: str) -> None:
        path = target / file
        with creating:
            check()
            path.parent.mkdir(parents=True, exist_ok=True)
            created = DurableFile(path, nbytes=sizes[file])
        with created as out:

            def write(block: bytes) -> None:
                check()
                out.write(block)

            try:
                store.stream(f"{prefix}{file}", write)
            except FileNotFoundError:
                raise unusable(
                    "a file of the checkpoint is missing in the store",
                    f"{store}/{prefix}{file}",
                    "",
                    "the checkpoint may have been removed meanwhile: try again",
                ) from None
            out.close()

    for file in sizes:
        if reason := layout.unsafe_path(file):
            raise unusable(
                "an object cannot be a file",
                f"{store}/{prefix}{file}",
                reason,
                "remove it, or use another URL",
            )
    pool = ThreadPoolExecutor(num_threads, "pull")
    try:
        pending = {pool.submit(fetch, file) for file in sizes}
        while pending:
            check()
            done, pending = wait(pending, _POLL_SECONDS, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
    except BaseException:
        # Also StoppedWaiting. Requests in progress are not waited for: they may take minutes. Their threads write
        # nothing more, and end.
        with creating:
            has_failed.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def check_space(directory: Path, nbytes: int, what: str) -> None:
    """Raise :class:`SaveFailed` if the disk of *directory* lacks the space for *what*."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise SaveFailed(
            f"the disk lacks the space for {what}",
            where=directory,
            value=f"{size_text(nbytes)} needed, {size_text(free)} free",
            hint="",
        )
