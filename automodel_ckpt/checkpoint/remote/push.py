"""Upload a checkpoint: its files in parallel, each verified, then the manifest that makes it complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from automodel_ckpt.checkpoint.export.export_manifest import (
    ExportManifest,
    complete_exports,
    export_problems,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.manifest import MAX_BYTES, Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote.parts import OtherNodes, files_here, only
from automodel_ckpt.checkpoint.remote.run import RemoteRun, conflict
from automodel_ckpt.checkpoint.store.store import BLOCK_BYTES, StoreError
from automodel_ckpt.checkpoint.store.transfer import (
    PART_BYTES,
    Throttle,
    UploadMemory,
    abort_uploads,
    has_digest,
    has_parts,
    upload_in_one_request,
    upload_in_parts,
)
from automodel_ckpt.errors import CheckpointUnusable, unusable

NUM_THREADS = 8
"""Files, and parts of large files, that are sent at the same time by default."""
_MAX_CONFLICTS = 5


def push_checkpoint(
    run: RemoteRun,
    checkpoint: Path,
    memory_file: Path,
    *,
    throttle: Throttle | None = None,
    num_threads: int = NUM_THREADS,
    on_other: Callable[[str], None] = lambda name: None,
    others: OtherNodes | None = None,
) -> int:
    """Upload *checkpoint* unless it is in the store; return the bytes sent.

    *memory_file* records on the local disk what is in the store, so that a later attempt continues. A
    different checkpoint of this name in the store is removed first, unless a pointer names it; *on_other* is called
    with the name before. *others* upload the files that *checkpoint* does not have.

    Raises:
        CheckpointUnusable: if the local files do not match the manifest, or another checkpoint is in the way.
        StoreError: if the store fails.
        LeaseLost: if another run took over the URL.
        InterruptedError: if the process is stopped.
    """
    throttle = throttle or Throttle()
    name = checkpoint.name
    data = read_safely(checkpoint, layout.MANIFEST, limit=MAX_BYTES)
    manifest = Manifest.parse(data, checkpoint / layout.MANIFEST)
    remote = run.manifest(name)
    is_superseded = run.is_superseded(name)
    if remote == data and not is_superseded:
        # A kill may have prevented this. Without files in it, it belongs to another upload.
        memory = UploadMemory.read(memory_file, manifest.digest, str(run.store))
        if memory.done:
            memory.forget()
        if others is not None:
            others.remove(run.store, name)
        return 0
    local = manifest if others is None else only(manifest, files_here(manifest, checkpoint))
    CheckpointUnusable.check(verify(checkpoint, local, "digest"))
    memory = UploadMemory.read(memory_file, manifest.digest, str(run.store))
    if is_superseded or (remote is not None and remote != data):
        on_other(name)
        try:
            run.withdraw(name)
        except ValueError as error:
            raise unusable(
                "another checkpoint of this name is in the store, and a pointer names it",
                f"{run.store}/{name}",
                str(error),
                "push to another URL, or remove it there with `ckpt prune`",
            ) from None
        memory.forget()
        memory = UploadMemory(memory_file, manifest.digest, str(run.store))
    sent_before = throttle.nbytes
    if others is not None:
        others.request(run.store, name, manifest.digest, local.files)
    send_files(run, checkpoint, local, memory, throttle, num_threads)
    if others is not None:
        _wait_for(others, run, checkpoint, manifest.files.keys() - local.files.keys())
    _check_sizes(run, name, manifest, memory)
    run.publish(name, data)
    # Uploads of attempts that lost their memory: no run continues them.
    abort_uploads(run.store, name)
    memory.forget()
    if others is not None:
        others.remove(run.store, name)
    return throttle.nbytes - sent_before


def send_files(
    run: RemoteRun,
    checkpoint: Path,
    manifest: Manifest,
    memory: UploadMemory,
    throttle: Throttle,
    num_threads: int,
) -> None:
    """Upload the files of *manifest* that *memory* does not have. None replaces an object of a later start of the run.

    Raises as :func:`push_checkpoint`.
    """
    store = run.store

    def attempt(file: str, name: str) -> bool:
        """Upload a file unless there is an object of this name. Return whether it was written."""
        path, record = checkpoint / file, manifest.files[file]
        if not has_parts(store):
            return store.upload(name, blocks_of(path, throttle), exclusive=store.is_conditional)
        if record.size > PART_BYTES:
            return upload_in_parts(store, name, path, record.digest, memory, throttle, parts)
        # In the pool of the parts, which limits how much memory and how many requests there are.
        request = parts.submit(upload_in_one_request, store, name, path, record.digest, throttle)
        return request.result()

    def send(file: str) -> None:
        name = f"{checkpoint.name}/{file}"
        for _ in range(_MAX_CONFLICTS):
            # If an earlier attempt sent it, that was interrupted before it noted that.
            if attempt(file, name) or (
                has_parts(store) and has_digest(store, name, manifest.files[file].digest)
            ):
                memory.note_done(file)
                return
            # An interrupted attempt, or an earlier start of the run, left it.
            version = store.version(name)
            run.check_owner()
            if version is not None:
                store.delete_version(name, version)
        raise conflict(store, name)

    missing = [file for file in manifest.files if file not in memory.done]
    throttle.expect(sum(manifest.files[file].size for file in missing))
    with (
        ThreadPoolExecutor(num_threads, "push") as files,
        ThreadPoolExecutor(num_threads, "parts") as parts,
    ):
        # list() raises the first failure. Files that arrived are in the memory.
        list(files.map(send, missing))


def _wait_for(
    others: OtherNodes, run: RemoteRun, checkpoint: Path, missing: Collection[str]
) -> None:
    """Wait until other nodes have uploaded the *missing* files. What cannot become complete is removed."""
    try:
        others.wait(run.store, checkpoint, missing)
    except CheckpointUnusable:
        others.remove(run.store, checkpoint.name)
        # A pointer can only name a complete one.
        with contextlib.suppress(ValueError):
            run.withdraw(checkpoint.name)
        raise


def blocks_of(path: Path, throttle: Throttle) -> Iterator[bytes]:
    """Yield the content of a file, at the rate of *throttle*."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            throttle.take(len(block))
            yield block


def _check_sizes(run: RemoteRun, name: str, manifest: Manifest, memory: UploadMemory) -> None:
    """Check that every file is in the store with its size. Raises :class:`StoreError`; then all are sent again."""
    # One request for a thousand files. What it does not show may still be there: a listing can be behind.
    listed = run.store.sizes(name)
    for file, record in manifest.files.items():
        size = listed.get(file)
        if size != record.size:
            with contextlib.suppress(FileNotFoundError):
                size = run.store.size(f"{name}/{file}")
        if size != record.size:
            memory.forget()
            raise StoreError(
                "an uploaded file is not in the store as it was sent; it is sent again",
                where=f"{run.store}/{name}/{file}",
                value="missing" if size is None else f"{size} bytes instead of {record.size}",
                hint="",
            )


# ---------------------------------------------------------------- exports


def push_exports(
    run: RemoteRun, checkpoint: Path, *, throttle: Throttle | None = None, num_threads: int = 8
) -> int:
    """Upload the exports of *checkpoint*, which is in the store, unless they are there; return the bytes sent.

    These are the Hugging Face files in addition to its own. An export in the store is complete if it has its manifest,
    ``export_manifest.json``, which is written last. Raises :class:`CheckpointUnusable` for a damaged export,
    :class:`StoreError`, and :class:`LeaseLost`.
    """
    throttle = throttle or Throttle()
    sent_before = throttle.nbytes
    for export in complete_exports(checkpoint):
        name = f"{checkpoint.name}/{export.relative_to(checkpoint).as_posix()}"
        _push_export(run, export, name, throttle, num_threads)
    return throttle.nbytes - sent_before


def _push_export(
    run: RemoteRun, export: Path, name: str, throttle: Throttle, num_threads: int
) -> None:
    store = run.store
    manifest_name = f"{name}/{layout.EXPORT_MANIFEST}"
    data = read_safely(export, layout.EXPORT_MANIFEST, limit=MAX_BYTES)
    try:
        if store.read(manifest_name) == data:
            return
        # Another export of this checkpoint: while its files are replaced, there is none.
        run.check_owner()
        store.delete([manifest_name])
    except FileNotFoundError:
        pass
    CheckpointUnusable.check(export_problems(export))
    files = ExportManifest.read(export).files

    def send(file: str) -> None:
        store.upload(f"{name}/{file}", blocks_of(export / file, throttle))

    run.check_owner()
    throttle.expect(sum((export / file).stat().st_size for file in files))
    with ThreadPoolExecutor(num_threads, "export") as pool:
        # list() raises the first failure.
        list(pool.map(send, files))
    run.check_owner()
    store.write(manifest_name, data)
