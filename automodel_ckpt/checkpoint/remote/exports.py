"""The exports of a checkpoint in a store: the Hugging Face files beside its own, uploaded with their manifest last."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from automodel_ckpt.checkpoint.export.export_manifest import (
    ExportManifest,
    complete_exports,
    export_problems,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.manifest import MAX_BYTES
from automodel_ckpt.checkpoint.remote.push import blocks_of
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import CheckpointUnusable


def push_exports(
    run: RemoteRun, checkpoint: Path, *, throttle: Throttle | None = None, num_threads: int = 8
) -> int:
    """Upload the exports of *checkpoint*, which is in the store, unless they are there; return the bytes sent.

    An export in the store is complete if it has its manifest, ``export_manifest.json``. Raises
    :class:`CheckpointUnusable` for a damaged export, :class:`StoreError`, and :class:`LeaseLost`.
    """
    throttle = throttle or Throttle()
    sent_before = throttle.nbytes
    for export in complete_exports(checkpoint):
        name = f"{checkpoint.name}/{export.relative_to(checkpoint).as_posix()}"
        _push(run, export, name, throttle, num_threads)
    return throttle.nbytes - sent_before


def exported_files(run: RemoteRun, name: str) -> dict[str, int]:
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


def _push(run: RemoteRun, export: Path, name: str, throttle: Throttle, num_threads: int) -> None:
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
    problems = export_problems(export)
    if problems:
        raise CheckpointUnusable.all_of(problems)
    files = ExportManifest.read(export).files

    def send(file: str) -> None:
        store.upload(f"{name}/{file}", blocks_of(export / file, throttle))

    run.check_owner()
    with ThreadPoolExecutor(num_threads, "export") as pool:
        # list() raises the first failure.
        list(pool.map(send, files))
    run.check_owner()
    store.write(manifest_name, data)
