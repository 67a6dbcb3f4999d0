"""Checkpoints in object stores, for the commands that accept a URL in place of a path."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.errors import CheckpointUnusable, Problem, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.manifest import Manifest
    from automodel_ckpt.checkpoint.remote.run import RemoteRun

_HINT = "use another checkpoint of this run, or push it again"
_SMALL_BYTES = 64 << 10
"""Files up to this size are read whole to show a checkpoint; of others, only values are read by their byte ranges."""


def open_run(url: str) -> tuple[RemoteRun, str | None]:
    """Open the run that *url* is, or is inside of, and return the name of the checkpoint that it names, if any.

    A pointer, such as ``s3://bucket/run/LATEST``, names its target. Raises :class:`RecipeError` for a URL that cannot
    be used, and :class:`CheckpointUnusable` for a pointer without a target.
    """
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.remote.run import RemoteRun
    from automodel_ckpt.checkpoint.remote.store import Store

    parent, _, last = url.rstrip("/").rpartition("/")
    if last in layout.POINTERS:
        run = RemoteRun(Store(parent))
        target = run.pointed(last)
        if target is None:
            raise _missing(url, "no such pointer")
        return run, target
    if layout.parse_checkpoint_name(last):
        return RemoteRun(Store(parent)), last
    return RemoteRun(Store(url)), None


def open_checkpoint(url: str) -> tuple[RemoteRun, str]:
    """Open the checkpoint that *url* names; of a run, its newest one. Raises as :func:`open_run`, and
    :class:`CheckpointUnusable` if there is none."""
    run, name = open_run(url)
    if name is None:
        newest = run.newest()
        if newest is None:
            raise _missing(url, "no complete checkpoint")
        name = str(newest.name)
    return run, name


def read_manifest(run: RemoteRun, name: str) -> Manifest:
    """Read the manifest of a checkpoint. Raises :class:`CheckpointUnusable` if it is absent or damaged."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.manifest import Manifest

    data = run.manifest(name)
    where = f"{run.store}/{name}"
    if data is None:
        raise _missing(where, "no manifest: absent or incomplete")
    return Manifest.parse(data, f"{where}/{layout.MANIFEST}")


def reject_url(path: str, command: str) -> None:
    """Raise :class:`RecipeError` if *path* is a URL: *command* needs a local checkpoint."""
    from automodel_ckpt.store_url import is_url

    if is_url(path):
        raise RecipeError(
            f"`ckpt {command}` needs a local checkpoint",
            where=f"ckpt {command}",
            value=path,
            hint="download it with `ckpt pull`",
        )


def remote_problems(run: RemoteRun, name: str, manifest: Manifest, *, deep: bool) -> list[Problem]:
    """Return the problems of a checkpoint's files in a store; empty if there are none.

    Every file has to be there with its size. With *deep*, each file is downloaded to a temporary directory, one after
    the other, and verified.
    """
    from automodel_ckpt.checkpoint.verify import verify

    problems = []
    for file, record in manifest.files.items():
        where = f"{run.store}/{name}/{file}"
        try:
            size = run.store.size(f"{name}/{file}")
        except FileNotFoundError:
            problems.append(Problem("a file of the checkpoint is missing", where, "", _HINT))
            continue
        if size != record.size:
            value = f"{size} bytes, {record.size} when it was saved"
            what = "a file of the checkpoint has another size"
            problems.append(Problem(what, where, value, _HINT))
        elif deep:
            with tempfile.TemporaryDirectory(prefix="ckpt-") as directory:
                path = Path(directory) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as target:
                    run.store.stream(f"{name}/{file}", target.write)
                only = replace(manifest, files={file: record})
                for problem in verify(Path(directory), only, "digest"):
                    problems.append(replace(problem, where=where))
    return problems


@contextlib.contextmanager
def sparse_copy(run: RemoteRun, name: str) -> Iterator[Path]:
    """Yield a temporary directory that looks like the checkpoint, without the bytes of its tensors.

    Files have their sizes. Small files, and values in large ones, have their content, which is read by byte ranges.
    """
    from automodel_ckpt.checkpoint import layout

    manifest = read_manifest(run, name)
    with tempfile.TemporaryDirectory(prefix="ckpt-") as directory:
        root = Path(directory) / name
        for file, record in manifest.files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as created:
                created.truncate(record.size)
                if record.size <= _SMALL_BYTES:
                    created.write(run.store.read(f"{name}/{file}"))
        for tree in manifest.trees.values():
            for blob in tree.objects.values():
                if manifest.files[blob.file].size > _SMALL_BYTES:
                    end = blob.start + blob.nbytes
                    data = run.store.read(f"{name}/{blob.file}", blob.start, end)
                    _write_at(root / blob.file, data, blob.start)
        (root / layout.MANIFEST).write_bytes(run.manifest(name) or b"")
        yield root


def _write_at(path: Path, data: bytes, start: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, start)


def _missing(where: str, value: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        "checkpoint not found", where=where, value=value, hint="`ckpt ls URL` lists the checkpoints"
    )
