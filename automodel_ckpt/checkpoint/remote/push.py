"""Upload a checkpoint: its files in parallel, each verified, then the manifest that makes it complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import FileRecord
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.manifest import MAX_BYTES, Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote.parts import OtherNodes, files_here
from automodel_ckpt.checkpoint.remote.run import RemoteRun
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
from automodel_ckpt.errors import CheckpointUnusable

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
    on_file: Callable[[str], None] = lambda name: None,
    on_other: Callable[[str], None] = lambda name: None,
    others: OtherNodes | None = None,
) -> int:
    """Upload *checkpoint* unless it is in the store; return the bytes sent.

    *memory_file* records on the local disk what is in the store, so that a later attempt continues. *on_file* is
    called with the name of each file that has arrived. A different checkpoint of this name in the store is removed
    first, unless a pointer names it; *on_other* is called with the name before. *others* upload the files that
    *checkpoint* does not have.

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
        # A kill may have prevented this.
        _forget(UploadMemory.read(memory_file, manifest.digest, str(run.store)))
        if others is not None:
            others.remove(run.store, name)
        return 0
    local = manifest if others is None else only(manifest, files_here(manifest, checkpoint))
    problems = verify(checkpoint, local, "digest")
    if problems:
        raise CheckpointUnusable.all_of(problems)
    memory = UploadMemory.read(memory_file, manifest.digest, str(run.store))
    if is_superseded or (remote is not None and remote != data):
        on_other(name)
        _make_way(run, name)
        memory.forget()
        memory = UploadMemory(memory_file, manifest.digest, str(run.store))
    sent_before = throttle.nbytes
    if others is not None:
        others.request(run.store, name, manifest.digest, local.files)
    send_files(run, checkpoint, local, memory, throttle, num_threads, on_file)
    if others is not None:
        try:
            others.wait(run.store, checkpoint, manifest.files.keys() - local.files.keys())
        except CheckpointUnusable:
            others.remove(run.store, name)
            # A pointer can only name a complete one.
            with contextlib.suppress(ValueError):
                run.withdraw(name)
            raise
    _check_sizes(run, name, manifest, memory)
    run.publish(name, data)
    # Of attempts whose memory was lost: no run continues them.
    abort_uploads(run.store, name)
    memory.forget()
    if others is not None:
        others.remove(run.store, name)
    return throttle.nbytes - sent_before


def only(manifest: Manifest, files: Mapping[str, FileRecord]) -> Manifest:
    """Restrict *manifest* to some *files*, which are then verified as a whole."""
    return replace(manifest, files=dict(files), trees={}, state={})


def send_files(
    run: RemoteRun,
    checkpoint: Path,
    manifest: Manifest,
    memory: UploadMemory,
    throttle: Throttle,
    num_threads: int,
    on_file: Callable[[str], None] = lambda name: None,
) -> None:
    """Upload the files of *manifest* that *memory* does not have. Raises as :func:`push_checkpoint`."""
    missing = [file for file in manifest.files if file not in memory.done]
    with (
        ThreadPoolExecutor(num_threads, "push") as files,
        ThreadPoolExecutor(num_threads, "parts") as parts,
    ):
        uploads = _Uploads(run, checkpoint, manifest, memory, throttle, parts)

        def send(file: str) -> None:
            uploads.send(file)
            memory.note_done(file)
            on_file(file)

        # list() raises the first failure. Files that arrived are in the memory.
        list(files.map(send, missing))


def _forget(memory: UploadMemory) -> None:
    """Remove the file of *memory* unless it belongs to another upload, and was therefore read as empty."""
    if memory.done:
        memory.forget()


def _make_way(run: RemoteRun, name: str) -> None:
    try:
        run.withdraw(name)
    except ValueError as error:
        raise CheckpointUnusable(
            "another checkpoint of this name is in the store, and a pointer names it",
            where=f"{run.store}/{name}",
            value=str(error),
            hint="push to another URL, or remove it there with `ckpt prune`",
        ) from None


@dataclass(frozen=True, slots=True)
class _Uploads:
    """Uploads the files of a checkpoint. None replaces an object of a later start of the run."""

    run: RemoteRun
    checkpoint: Path
    manifest: Manifest
    memory: UploadMemory
    throttle: Throttle
    pool: Executor

    def send(self, file: str) -> None:
        """Upload a file of the checkpoint. Raises as :func:`push_checkpoint`."""
        store = self.run.store
        name = f"{self.checkpoint.name}/{file}"
        for _ in range(_MAX_CONFLICTS):
            if self._try(name, file):
                return
            if has_parts(store) and has_digest(store, name, self.manifest.files[file].digest):
                # An earlier attempt sent it, and was interrupted before it noted that.
                return
            # An interrupted attempt, or an earlier start of the run, left it.
            version = store.version(name)
            self.run.check_owner()
            if version is not None:
                store.delete_version(name, version)
        raise StoreError(
            "an object is being changed by another writer",
            where=f"{store}/{name}",
            value="",
            hint="it is tried again; give each run its own URL",
        )

    def _try(self, name: str, file: str) -> bool:
        """Upload a file unless there is an object of this name. Return whether it was written."""
        store, throttle = self.run.store, self.throttle
        path, record = self.checkpoint / file, self.manifest.files[file]
        if not has_parts(store):
            return store.upload(name, blocks_of(path, throttle), exclusive=store.is_conditional)
        if record.size > PART_BYTES:
            return upload_in_parts(
                store, name, path, record.digest, self.memory, throttle, self.pool
            )
        # In the pool of the parts, which limits how much memory and how many requests there are.
        request = self.pool.submit(
            upload_in_one_request, store, name, path, record.digest, throttle
        )
        return request.result()


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
        size = listed.get(file, -1)
        if size != record.size:
            size = _size(run, f"{name}/{file}")
        if size != record.size:
            memory.forget()
            raise StoreError(
                "an uploaded file is not in the store as it was sent",
                where=f"{run.store}/{name}/{file}",
                value="missing" if size < 0 else f"{size} bytes instead of {record.size}",
                hint="it is sent again",
            )


def _size(run: RemoteRun, name: str) -> int:
    """The size of an object in bytes; -1 if there is none."""
    try:
        return run.store.size(name)
    except FileNotFoundError:
        return -1
