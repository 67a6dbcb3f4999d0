"""Download a checkpoint: its files in parallel into a staging directory, verified, and published as a save is."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.store import Store
from automodel_ckpt.checkpoint.run.maintenance import without_optimizer
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.durable_io import replace_file
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from automodel_ckpt.store_url import public
from automodel_ckpt.units import size_text


def pull_checkpoint(
    run: RemoteRun,
    name: str,
    root: Path,
    *,
    num_threads: int = 8,
    on_file: Callable[[str], None] = lambda name: None,
) -> Path:
    """Download the checkpoint *name* into the run directory *root*, and return its path.

    It appears under its name when all its files are there, verified and durable. *on_file* is called with the name of
    each file that has arrived.

    Raises:
        CheckpointUnusable: if the store has no complete checkpoint of this name, or its files do not match it.
        SaveFailed: if the local disk lacks the space.
        StoreError: if the store fails.
    """
    data = run.manifest(name)
    if data is None:
        raise _absent(run, name)
    manifest = run.parse_manifest(name, data)
    _check_space(root, manifest)
    staging = commit.reserve(root, name)
    try:
        _download(run, name, manifest, staging, num_threads, on_file)
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
    for file in (layout.TRAINING_LOG, layout.VALIDATION_LOG, layout.TIMELINE_LOG):
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
    _check_space(target, manifest)
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
    for file in sizes:
        if reason := layout.unsafe_path(file):
            raise CheckpointUnusable(
                f"an object cannot be a file: {reason}",
                where=str(store),
                value=file,
                hint="remove it, or use another URL",
            )
    free = shutil.disk_usage(target).free
    if free < sum(sizes.values()):
        raise _no_space(target, sum(sizes.values()), free)
    path = target / public(store.url).rpartition("/")[2]
    path.mkdir()

    def fetch(file: str) -> None:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        _fetch(store, file, path / file, sizes[file])

    with ThreadPoolExecutor(num_threads, "pull") as pool:
        list(pool.map(fetch, sizes))
    return path


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


def _check_space(root: Path, manifest: Manifest) -> None:
    free = shutil.disk_usage(root).free
    if free < manifest.nbytes:
        raise _no_space(root, manifest.nbytes, free)


def _no_space(root: Path, nbytes: int, free: int) -> SaveFailed:
    return SaveFailed(
        "the disk lacks the space for the checkpoint",
        where=str(root),
        value=f"{size_text(nbytes)} needed, {size_text(free)} free",
        hint="free disk space, or choose another directory",
    )
