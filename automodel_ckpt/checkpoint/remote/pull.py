"""Download a checkpoint: its files in parallel into a staging directory, verified, and published as a save is."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.export_manifest import complete_exports, export_problems
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.remote.exports import exported_files
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.store import Store
from automodel_ckpt.checkpoint.run.maintenance import without_optimizer
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.durable_io import replace_file
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from automodel_ckpt.store_url import public
from automodel_ckpt.units import size_text

LOGS = (layout.TRAINING_LOG, layout.VALIDATION_LOG, layout.TIMELINE_LOG)
"""The logs of a run that are uploaded with each checkpoint."""


def pull_checkpoint(
    run: RemoteRun,
    name: str,
    root: Path,
    *,
    num_threads: int = 8,
    on_file: Callable[[str], None] = lambda name: None,
    with_exports: bool = False,
) -> Path:
    """Download the checkpoint *name* into the run directory *root*, and return its path.

    It appears under its name when all its files are there, verified and durable; *with_exports*, also those of its
    complete exports. *on_file* is called with the name of each file of the checkpoint that has arrived.

    Raises:
        CheckpointUnusable: if the store has no complete checkpoint of this name, or its files do not match it or, of an
            export, the export's manifest.
        SaveFailed: if the local disk lacks the space.
        StoreError: if the store fails.
    """
    data = run.manifest(name)
    if data is None:
        raise _absent(run, name)
    manifest = run.parse_manifest(name, data)
    exported = exported_files(run, name) if with_exports else {}
    _check_space(root, manifest.nbytes + sum(exported.values()))
    staging = commit.reserve(root, name)
    try:
        _download(run, name, manifest, staging, num_threads, on_file)
        _download_exports(run, name, exported, staging, num_threads)
        commit.finalize(staging, data)
        return commit.publish(staging, name)
    except BaseException:
        with contextlib.suppress(OSError):
            commit.discard(staging)
        raise


def pull_files(
    run: RemoteRun, name: str, files: Iterable[str], target: Path, *, num_threads: int = 8
) -> Path:
    """Download some *files* of the checkpoint *name*, and its manifest, into a new directory of this name in *target*.

    Return the directory, which is not a complete checkpoint. Raises as :func:`pull_checkpoint`.
    """
    data = run.manifest(name)
    if data is None:
        raise _absent(run, name)
    manifest = run.parse_manifest(name, data)
    chosen = {file: manifest.files[file] for file in files}
    path = target / name
    path.mkdir()
    only = replace(manifest, files=chosen, trees={}, state={})
    _download(run, name, only, path, num_threads, lambda file: None)
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


def pull_weights(run: RemoteRun, name: str | None, target: Path, *, num_threads: int = 8) -> Path:
    """Download the models of the checkpoint *name* into a new directory in *target*, and return it.

    It is a checkpoint without the state of optimizers. Without a *name*, all files at the URL of *run* are downloaded:
    a model that another program wrote, or an export. Raises as :func:`pull_checkpoint`.
    """
    if name is None:
        return _pull_directory(run.store, target, num_threads)
    data = run.manifest(name)
    if data is None:
        raise _absent(run, name)
    whole = run.parse_manifest(name, data)
    manifest = without_optimizer(whole)
    _check_space(target, manifest.nbytes)
    path = target / name
    path.mkdir()
    _download(run, name, manifest, path, num_threads, lambda file: None)
    (path / layout.MANIFEST).write_bytes(manifest.to_bytes())
    return path


def _pull_directory(store: Store, target: Path, num_threads: int) -> Path:
    """Download all objects below the URL of *store* into a new directory in *target*."""
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
    _fetch_all(store, "", sizes, path, num_threads)
    return path


def _download_exports(
    run: RemoteRun, name: str, sizes: Mapping[str, int], target: Path, num_threads: int
) -> None:
    """Download the exports of a checkpoint, whose files have *sizes*, into the checkpoint's directory *target*.

    They are verified by their manifests. Raises :class:`CheckpointUnusable`.
    """
    _fetch_all(run.store, f"{name}/", sizes, target, num_threads)
    problems = []
    for export in complete_exports(target):
        problems += export_problems(export)
    if problems:
        hint = "download the checkpoint without its exports (--no-exports), or push it again"
        raise CheckpointUnusable.all_of([replace(each, hint=hint) for each in problems])


def _fetch_all(
    store: Store, prefix: str, sizes: Mapping[str, int], target: Path, num_threads: int
) -> None:
    """Download the objects that *sizes* names, below *prefix* in the store, into the directory *target*.

    Raises :class:`CheckpointUnusable` for a name that is no file in *target*.
    """
    for file in sizes:
        if reason := layout.unsafe_path(file):
            raise CheckpointUnusable(
                f"an object cannot be a file: {reason}",
                where=str(store),
                value=f"{prefix}{file}",
                hint="remove it, or use another URL",
            )

    def fetch(file: str) -> None:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        _fetch(store, f"{prefix}{file}", target / file, sizes[file])

    with ThreadPoolExecutor(num_threads, "pull") as pool:
        # list() raises the first failure.
        list(pool.map(fetch, sizes))


def _download(
    run: RemoteRun,
    name: str,
    manifest: Manifest,
    target: Path,
    num_threads: int,
    on_file: Callable[[str], None],
) -> None:
    """Download the files of *manifest* into *target*, and verify them. Raises :class:`CheckpointUnusable`."""
    for directory in {(target / file).parent for file in manifest.files}:
        directory.mkdir(parents=True, exist_ok=True)

    def fetch(file: str) -> None:
        _fetch(run.store, f"{name}/{file}", target / file, manifest.files[file].size)
        on_file(file)

    with ThreadPoolExecutor(num_threads, "pull") as pool:
        # list() raises the first failure.
        list(pool.map(fetch, manifest.files))
    problems = verify(target, manifest, "digest")
    if problems:
        raise CheckpointUnusable.all_of(problems)


def _absent(run: RemoteRun, name: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        "the store has no complete checkpoint of this name",
        where=str(run.store),
        value=name,
        hint="`ckpt ls URL` lists the checkpoints",
    )


def _fetch(store: Store, name: str, path: Path, size: int) -> None:
    try:
        with DurableFile(path, nbytes=size) as file:
            store.stream(name, file.write)
            file.close()
    except FileNotFoundError:
        raise CheckpointUnusable(
            "a file of the checkpoint is missing in the store",
            where=f"{store}/{name}",
            value="",
            hint="the checkpoint may have been removed meanwhile: try again",
        ) from None


def _check_space(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise SaveFailed(
            "the disk lacks the space for the checkpoint",
            where=str(directory),
            value=f"{size_text(nbytes)} needed, {size_text(free)} free",
            hint="free disk space, or choose another directory",
        )
