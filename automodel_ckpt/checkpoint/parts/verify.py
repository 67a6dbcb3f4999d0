"""Verify that the files of a checkpoint match its manifest. Imports no torch."""

from __future__ import annotations

import contextlib
import heapq
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.durable_file import file_record
from automodel_ckpt.checkpoint.files.safe_open import is_sparse, link_on_the_way, open_safely
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool
from automodel_ckpt.checkpoint.parts.manifest import Blob, Manifest
from automodel_ckpt.checkpoint.parts.merkle import (
    FileSlice,
    damaged,
    has_merkle_digest,
    head_fits,
    slices_by_file,
    slices_in,
)
from automodel_ckpt.checkpoint.parts.slices import Slice
from automodel_ckpt.checkpoint.parts.tree import in_rank_files
from automodel_ckpt.errors import CheckpointUnusable, Problem, os_problem

Level = Literal["none", "size", "digest"]

_TASK_BYTES = 64 << 20
_SHOWN = 5
_HINT = "use another checkpoint of this run, or a copy of the file"


def verify(
    checkpoint: Path,
    manifest: Manifest,
    level: Level = "digest",
    *,
    rank: int = 0,
    num_ranks: int = 1,
    num_threads: int = 2,
) -> list[Problem]:
    """Return the problems of a checkpoint's files, in the order of the manifest; empty if there are none.

    Level ``size``: every file exists, is regular and has its size. ``digest``: its bytes also match its digest; the
    problems list the damaged tensors. ``none`` checks nothing. With several ranks, each reads a part of the files.
    """
    if level == "none":
        return []
    try:
        mine = _share(list(_tasks(manifest)), rank, num_ranks)
        problems = _table_problems(checkpoint, manifest) if rank == 0 else []
    except CheckpointUnusable as error:
        return list(error.problems)
    if problems:
        return problems
    # A file is in a task of some rank: with thousands of files and ranks, no rank checks all sizes.
    my_files = {task.path for task in mine}
    for path, record in manifest.files.items():
        problem = size_problem(checkpoint, path, record) if path in my_files else None
        if problem is not None:
            problems.append(problem)
    if problems or level == "size":
        return problems
    with started_pool(num_threads, "verify") or CallingThread() as pool:
        found = pool.map(lambda task: _digest_problem(checkpoint, manifest, task), mine)
        return [problem for problem in found if problem is not None]


def _table_problems(checkpoint: Path, manifest: Manifest) -> list[Problem]:
    """Return the problem of the first table whose file has another size. Raises :class:`CheckpointUnusable` for the
    first whose head does not match the tensors."""
    for tree in manifest.trees.values():
        if tree.table is None:
            continue
        file = tree.table.location.file
        record = manifest.files.get(file)
        # Before the counts, which take memory in proportion to this size. A caller may select some of the files.
        problem = None if record is None else size_problem(checkpoint, file, record)
        if problem is not None:
            return [problem]
        tree.table.check_counts()
    return []


class _Task(NamedTuple):
    """A file to read, or a part of it.

    If the file has a Merkle digest: ``slices[first:last]``. The first task also reads what is in no slice.
    """

    path: str
    nbytes: int
    slices: Sequence[FileSlice] | None = None
    first: int = 0
    last: int = 0


def _tasks(manifest: Manifest) -> Iterator[_Task]:
    """Yield the work of verifying all files. Files with a Merkle digest are divided into tasks of about 64 MiB."""
    slices_by: dict[str, list[FileSlice]] = {}
    if any(has_merkle_digest(record) for record in manifest.files.values()):
        stored = [tensor for tree in manifest.trees.values() for tensor in tree.stored]
        slices_by = slices_by_file(stored)
    for path, record in manifest.files.items():
        slices = slices_by.get(path, [])
        if not has_merkle_digest(record):
            # One task: XXH3 digests of parts cannot be combined into that of the file.
            yield _Task(path, record.size)
            continue
        first = 0
        nbytes = 0
        for last, one in enumerate(slices, start=1):
            nbytes += one.stored.nbytes
            if nbytes >= _TASK_BYTES and last < len(slices):
                yield _Task(path, nbytes, slices, first, last)
                first = last
                nbytes = 0
        yield _Task(path, nbytes, slices, first, len(slices))


def _share(tasks: Sequence[_Task], rank: int, num_ranks: int) -> list[_Task]:
    """Return the tasks of this rank. They are divided so that all ranks read about the same number of bytes."""
    # The ranks do not communicate: each must compute the same division, from the manifest alone.
    loads = [(0, reader) for reader in range(num_ranks)]
    mine = []
    for task in sorted(tasks, key=lambda task: -task.nbytes):
        load, reader = loads[0]
        # Empty files are distributed, too.
        heapq.heapreplace(loads, (load + max(task.nbytes, 1), reader))
        if reader == rank:
            mine.append(task)
    return mine


def size_problem(checkpoint: Path, path: str, record: FileRecord) -> Problem | None:
    """Return the problem of a file that can be found without reading it; None if there is none."""
    where = checkpoint / path
    link = link_on_the_way(checkpoint, path)
    if link:
        return Problem("a checkpoint contains a symbolic link", str(checkpoint / link), path, _HINT)
    try:
        status = os.lstat(where)
    except FileNotFoundError as error:
        return Problem("a file of the checkpoint is missing", str(where), error.strerror, _HINT)
    except OSError as error:
        return Problem("a file of the checkpoint cannot be read", str(where), error.strerror, _HINT)
    if not stat.S_ISREG(status.st_mode):
        return Problem(
            "a file of the checkpoint is not a regular file",
            str(where),
            stat.filemode(status.st_mode),
            _HINT,
        )
    if status.st_size != record.size:
        value = f"{status.st_size} bytes, {record.size} when it was saved"
        return Problem("a file of the checkpoint has another size", str(where), value, _HINT)
    if is_sparse(status):
        value = f"{status.st_size} bytes, of which {status.st_blocks * 512} are on the disk"
        return Problem("a file of the checkpoint is nearly all hole", str(where), value, _HINT)
    return None


def _digest_problem(checkpoint: Path, manifest: Manifest, task: _Task) -> Problem | None:
    where = checkpoint / task.path
    try:
        is_intact, damaged_parts = _read_task(checkpoint, manifest, task)
    except OSError as error:
        return Problem("a file of the checkpoint cannot be read", str(where), error.strerror, _HINT)
    except CheckpointUnusable as error:  # a damaged table
        return error.problems[0]
    if is_intact:
        return None
    shown = damaged_parts[:_SHOWN]
    if len(damaged_parts) > _SHOWN:
        shown.append(f"{len(damaged_parts) - _SHOWN} more")
    value = "the damage is in no tensor"
    if shown:
        value = f"damaged: {', '.join(shown)}"
    return Problem(
        "a file of the checkpoint is not what was saved: its digest differs",
        str(where),
        value,
        _HINT,
    )


def _read_task(checkpoint: Path, manifest: Manifest, task: _Task) -> tuple[bool, list[str]]:
    """Read a file or slices. Returns whether they are intact, and descriptions of the damaged tensors and values."""
    path = task.path
    record = manifest.files[path]
    if task.slices is not None:
        wrong = damaged(checkpoint, path, task.slices[task.first : task.last])
        is_intact = not wrong
        if is_intact and task.first == 0:
            # The first task of a file also checks the bytes before the first slice.
            is_intact = head_fits(checkpoint, path, record, task.slices)
        return is_intact, [_named(stored) for stored in wrong]
    if file_record(checkpoint / path) == record:
        return True, []
    with mapped(checkpoint, path) as data, contextlib.suppress(CheckpointUnusable):
        return False, list(_damaged(_parts_in(manifest, path, _listed_parts(manifest)), data))
    return False, []


def _listed_parts(manifest: Manifest) -> dict[str, list[Slice | Blob]]:
    """Map each file to its values, and to its slices that no table describes."""
    parts: dict[str, list[Slice | Blob]] = {}
    for tree in manifest.trees.values():
        for tensor in tree.tensors.values():
            for stored in () if in_rank_files(tensor) else tensor.slices:
                parts.setdefault(stored.file, []).append(stored)
        for blob in tree.objects.values():
            parts.setdefault(blob.file, []).append(blob)
    return parts


def _parts_in(
    manifest: Manifest, path: str, listed: Mapping[str, Sequence[Slice | Blob]]
) -> list[Slice | Blob]:
    """Return the slices and values of a file. *listed* are those of :func:`_listed_parts`."""
    in_tables = [one.stored for one in slices_in(manifest.trees.values(), path)]
    return [*in_tables, *listed.get(path, ())]


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
        # If the file is truncated while it is mapped, reading ends the process (SIGBUS).
        content.madvise(mmap.MADV_SEQUENTIAL)
        with memoryview(content) as view:
            yield view


def verify_deep(checkpoint: Path, manifest: Manifest) -> list[Problem]:
    """Compare what :func:`verify` does not: every slice's own digest, and files that the manifest does not list.

    Exports have different manifests (``export_manifest.py``).
    """
    problems, listed = [], _listed_parts(manifest)
    # All files of a tree have the damage of its table. A dict, because it has an order.
    of_tables: dict[Problem, None] = {}
    for path in manifest.files:
        with contextlib.suppress(OSError, ValueError):
            try:
                parts = _parts_in(manifest, path, listed)
            except CheckpointUnusable as error:
                of_tables.update(dict.fromkeys(error.problems))
                parts = [*listed.get(path, ())]
            if wrong := _disagreeing(checkpoint, manifest, path, parts):
                value = ", ".join(wrong)
                problems.append(
                    Problem("the manifest's digests disagree", str(checkpoint / path), value, _HINT)
                )
    problems = [*of_tables, *problems]
    unlisted: Sequence[str] = ()
    try:
        unlisted = unlisted_files(checkpoint, manifest)
    except OSError as error:
        hint = "check the permissions and the disk"
        problems.append(os_problem(error, "a directory cannot be read", hint=hint))
    for path in unlisted:
        hint = "remove it if it is not yours; nothing reads it"
        problems.append(
            Problem("a file that the manifest does not name", str(checkpoint / path), "", hint)
        )
    return problems


def _disagreeing(
    checkpoint: Path, manifest: Manifest, path: str, parts: Iterable[Slice | Blob]
) -> list[str]:
    """Return the damage that the digests of slices show in a file whose own digest is correct."""
    record = manifest.files[path]
    if has_merkle_digest(record):
        return []  # its own digest is of its slices'
    with mapped(checkpoint, path) as data:
        return [*_damaged(parts, data)] if digest_of(data) == record.digest else []


def unlisted_files(checkpoint: Path, manifest: Manifest) -> Sequence[str]:
    """Files in the checkpoint that the manifest does not list; relative, sorted. The manifest itself, exports, and what
    killed exports left are not among them. Raises OSError for a directory that cannot be read."""
    known = {*manifest.files, layout.MANIFEST}
    found = (
        os.path.relpath(os.path.join(directory, name), checkpoint)
        for directory, _, names in walk(checkpoint)
        for name in names
    )
    return sorted(path for path in found if path not in known and not _is_of_export(path))


def _is_of_export(path: str) -> bool:
    return any(
        part in layout.EXPORTS or layout.is_export_leftover(part) for part in path.split("/")[:-1]
    )
