"""Whether the files of a checkpoint are those that its manifest names. Imports no torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.durable_file import file_record
from automodel_ckpt.checkpoint.files.safe_open import is_sparse, link_on_the_way, open_safely
from automodel_ckpt.checkpoint.manifest import Blob, Manifest
from automodel_ckpt.checkpoint.merkle import (
    Held,
    damaged,
    has_merkle_digest,
    head_fits,
    held_by_file,
)
from automodel_ckpt.checkpoint.slices import Slice
from automodel_ckpt.errors import Problem

Level = Literal["none", "size", "digest"]

_TASK_BYTES = 64 << 20
_SHOWN = 5
_REMEDY = "use another checkpoint of this run, or a copy of the file"


def verify(
    checkpoint: Path,
    manifest: Manifest,
    level: Level = "digest",
    *,
    rank: int = 0,
    num_ranks: int = 1,
    num_threads: int = 2,
) -> list[Problem]:
    """All that is wrong with a checkpoint's files, in the manifest's order; empty where nothing is.

    ``size``: every file is there, regular and as long as it was. ``digest``: and holds the same bytes; a damaged file's
    damaged tensors are named. Of several ranks each reads its share of the files. ``none`` looks at nothing.
    """
    if level == "none":
        return []
    problems = [
        p
        for path, record in manifest.files.items()
        if (p := size_problem(checkpoint, path, record))
    ]
    if problems or level == "size":
        return problems
    mine = _share([*_tasks(manifest)], rank, num_ranks)
    with ThreadPoolExecutor(num_threads) as pool:
        found = pool.map(lambda task: _digest_problem(checkpoint, manifest, task), mine)
        return [problem for problem in found if problem]


class _Task(NamedTuple):
    """A file to read; of one that several ranks filled, whose *held* slices stand for it, those in ``first:last``."""

    path: str
    nbytes: int
    held: Sequence[Held] | None = None
    first: int = 0
    last: int = 0


def _tasks(manifest: Manifest) -> Iterator[_Task]:
    """The manifest's files, those that can be checked slice by slice in parts of some ten megabytes."""
    held_by = held_by_file(tensor for tree in manifest.trees.values() for tensor in tree.stored)
    for path, record in manifest.files.items():
        held = held_by.get(path, [])
        if not has_merkle_digest(record):
            yield _Task(path, record.size)
            continue
        first, nbytes = 0, 0
        for last, one in enumerate(held, start=1):
            nbytes += one.piece.nbytes
            if nbytes >= _TASK_BYTES and last < len(held):
                yield _Task(path, nbytes, held, first, last)
                first, nbytes = last, 0
        yield _Task(path, nbytes, held, first, len(held))


def _share(tasks: Sequence[_Task], rank: int, num_ranks: int) -> list[_Task]:
    """Those for this rank, so that all ranks read about as many bytes."""
    loads, mine = [0] * num_ranks, []
    for task in sorted(tasks, key=lambda task: -task.nbytes):
        reader = loads.index(min(loads))
        loads[reader] += task.nbytes
        if reader == rank:
            mine.append(task)
    return mine


def size_problem(checkpoint: Path, path: str, record: FileRecord) -> Problem | None:
    where = checkpoint / path
    if link := link_on_the_way(checkpoint, path):
        return Problem(
            "a checkpoint contains a symbolic link", str(checkpoint / link), path, _REMEDY
        )
    try:
        status = os.lstat(where)
    except OSError as error:
        return Problem("a file of the checkpoint is missing", str(where), error.strerror, _REMEDY)
    if not stat.S_ISREG(status.st_mode):
        return Problem(
            "a file of the checkpoint is not a regular file",
            str(where),
            stat.filemode(status.st_mode),
            _REMEDY,
        )
    if status.st_size != record.size:
        value = f"{status.st_size} bytes, {record.size} when it was saved"
        return Problem("a file of the checkpoint has another size", str(where), value, _REMEDY)
    if is_sparse(status):
        value = f"{status.st_size} bytes, of which {status.st_blocks * 512} are on the disk"
        return Problem("a file of the checkpoint is nearly all hole", str(where), value, _REMEDY)
    return None


def _digest_problem(checkpoint: Path, manifest: Manifest, task: _Task) -> Problem | None:
    where = checkpoint / task.path
    try:
        intact, named = _look(checkpoint, manifest, task)
    except OSError as error:
        return Problem(
            "a file of the checkpoint cannot be read", str(where), error.strerror, _REMEDY
        )
    if intact:
        return None
    shown = named[:_SHOWN] + [f"{len(named) - _SHOWN} more"] * (len(named) > _SHOWN)
    value = "damaged: " + ", ".join(shown) if named else "the damage is in no tensor"
    return Problem(
        "a file of the checkpoint is not what was saved: its digest differs",
        str(where),
        value,
        _REMEDY,
    )


def _look(checkpoint: Path, manifest: Manifest, task: _Task) -> tuple[bool, list[str]]:
    """Whether a file is the one that was saved, and if not which of its tensors and values are others."""
    path, record = task.path, manifest.files[task.path]
    if task.held is not None:
        wrong = damaged(checkpoint, path, task.held[task.first : task.last])
        intact = not wrong and (task.first > 0 or head_fits(checkpoint, path, record, task.held))
        return intact, [_named(piece) for piece in wrong]
    if file_record(checkpoint / path) == record:
        return True, []
    with mapped(checkpoint, path) as data:
        return False, [*_damaged(_parts(manifest).get(path, ()), data)]


def _parts(manifest: Manifest) -> dict[str, list[Slice | Blob]]:
    """What each file holds that one rank wrote."""
    parts: dict[str, list[Slice | Blob]] = {}
    for tree in manifest.trees.values():
        held: list[Slice | Blob] = [s for tensor in tree.tensors.values() for s in tensor.slices]
        for part in (*held, *tree.objects.values()):
            parts.setdefault(part.file, []).append(part)
    return parts


def _damaged(parts: Iterable[Slice | Blob], data: memoryview) -> Iterator[str]:
    for part in parts:
        if digest_of(data[part.start : part.start + part.nbytes]) != part.digest:
            yield _named(part)


def _named(part: Slice | Blob) -> str:
    return (
        f"tensor {part.fqn} (slice at {list(part.offsets)})"
        if isinstance(part, Slice)
        else f"value {part.fqn}"
    )


@contextlib.contextmanager
def mapped(root: Path, path: str) -> Iterator[memoryview]:
    """The content of a regular file below *root* as memory, without reading it into any."""
    descriptor = open_safely(root, path)
    try:
        size = os.fstat(descriptor).st_size
        content = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else None
    finally:
        os.close(descriptor)
    if content is None:
        yield memoryview(b"")
        return
    with content:
        content.madvise(mmap.MADV_SEQUENTIAL)
        with memoryview(content) as view:
            yield view


def verify_deep(checkpoint: Path, manifest: Manifest) -> list[Problem]:
    """Compare what :func:`verify` does not: every slice's own digest, and files that the manifest does not list.

    Exports have manifests of their own (``export_manifest.py``).
    """
    problems, parts = [], _parts(manifest)
    for path in manifest.files:
        with contextlib.suppress(OSError, ValueError):
            if wrong := _disagreeing(checkpoint, manifest, path, parts.get(path, ())):
                value = ", ".join(wrong)
                problems.append(
                    Problem(
                        "the manifest's digests disagree", str(checkpoint / path), value, _REMEDY
                    )
                )
    for path in unlisted_files(checkpoint, manifest):
        hint = "remove it if it is not yours; nothing reads it"
        problems.append(
            Problem("a file that the manifest does not name", str(checkpoint / path), "", hint)
        )
    return problems


def _disagreeing(
    checkpoint: Path, manifest: Manifest, path: str, parts: Iterable[Slice | Blob]
) -> list[str]:
    """Of a file that is whole by its own digest: what is damaged by its slices' digests."""
    record = manifest.files[path]
    if has_merkle_digest(record):
        return []  # its own digest is of its slices'
    with mapped(checkpoint, path) as data:
        return [*_damaged(parts, data)] if digest_of(data) == record.digest else []


def unlisted_files(checkpoint: Path, manifest: Manifest) -> Sequence[str]:
    """Files in the checkpoint that the manifest does not list; relative, sorted. The manifest itself, exports, and what
    killed exports left are not among them."""
    known = {*manifest.files, layout.MANIFEST}
    found = (
        os.path.relpath(os.path.join(directory, name), checkpoint)
        for directory, _, names in os.walk(checkpoint)
        for name in names
    )
    return sorted(path for path in found if path not in known and not _is_of_export(path))


def _is_of_export(path: str) -> bool:
    return any(
        part in layout.EXPORTS or layout.is_export_leftover(part) for part in path.split("/")[:-1]
    )
