"""Verify that the files of a checkpoint match its manifest: their slices, digests and Merkle digests. No torch.

A file that consists of exactly the header that a save writes and of slices is verified by the digests of its slices.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import file_record
from automodel_ckpt.checkpoint.files.safe_open import begins_with
from automodel_ckpt.checkpoint.files.safetensors_header import shard_header
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool
from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import Slice
from automodel_ckpt.checkpoint.parts.tree import (
    FileContents,
    FileSlice,
    damage_text,
    damaged,
    has_merkle_digest,
    head_fits,
    size_problem,
)
from automodel_ckpt.errors import TAKE_ANOTHER, CheckpointUnusable, Problem, os_problem

_TASK_BYTES = 64 << 20


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
        contents = FileContents(manifest.trees.values())
    except CheckpointUnusable as error:  # a damaged table
        return list(error.problems)
    mine = _share(_tasks(manifest, contents), rank, num_ranks)
    # A file is in a task of some rank: with thousands of files and ranks, no rank checks all sizes.
    my_files = {task.path for task in mine}
    files = [(path, record) for path, record in manifest.files.items() if path in my_files]
    problems = [problem for each in files if (problem := size_problem(checkpoint, *each))]
    if problems or level == "size":
        return problems
    with started_pool(num_threads, "verify") or CallingThread() as pool:
        found = pool.map(lambda task: _digest_problem(checkpoint, manifest, contents, task), mine)
        return [problem for problem in found if problem is not None]


class _Task(NamedTuple):
    """A file to read; of one with a Merkle digest, only *slices*, and with *is_first* the bytes before all slices."""

    path: str
    nbytes: int
    slices: Sequence[FileSlice] | None = None
    is_first: bool = True


def _tasks(manifest: Manifest, contents: FileContents) -> Iterator[_Task]:
    """Yield the work of verifying all files. Files with a Merkle digest are divided into tasks of about 64 MiB."""
    for path, record in manifest.files.items():
        if not has_merkle_digest(record):
            # One task: XXH3 digests of parts cannot be combined into the file's digest.
            yield _Task(path, record.size)
            continue
        slices: list[FileSlice] = []
        nbytes, is_first = 0, True
        for one in contents.listed(path):
            if nbytes >= _TASK_BYTES:
                yield _Task(path, nbytes, slices, is_first)
                slices, nbytes, is_first = [], 0, False
            slices.append(one)
            nbytes += one.stored.nbytes
        yield _Task(path, nbytes, slices, is_first)


def _share(tasks: Iterable[_Task], rank: int, num_ranks: int) -> list[_Task]:
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


def _digest_problem(
    checkpoint: Path, manifest: Manifest, contents: FileContents, task: _Task
) -> Problem | None:
    """Read a file or slices of it. Return the damage, with the tensors and values that it is in."""
    path, record = task.path, manifest.files[task.path]
    wrong: Sequence[FileSlice] = ()
    try:
        if task.slices is None:
            if file_record(checkpoint / path) == record:
                return None
            with contextlib.suppress(CheckpointUnusable):  # a damaged table
                wrong = damaged(checkpoint, path, contents.slices(path))
        else:
            wrong = damaged(checkpoint, path, task.slices)
            fits = not task.is_first or head_fits(checkpoint, path, record, contents.listed(path))
            if fits and not wrong:
                return None
    except OSError as error:
        what = "a file of the checkpoint cannot be read"
        return Problem(what, str(checkpoint / path), error.strerror, TAKE_ANOTHER)
    what = "a file of the checkpoint is not what was saved: its digest differs"
    return Problem(what, str(checkpoint / path), damage_text(wrong), TAKE_ANOTHER)


def verify_deep(checkpoint: Path, manifest: Manifest) -> list[Problem]:
    """Compare what :func:`verify` does not: every slice's own digest, and files that the manifest does not list.

    Exports have different manifests (``export_manifest.py``).
    """
    try:
        contents = FileContents(manifest.trees.values())
    except CheckpointUnusable as error:  # a damaged table
        return list(error.problems)
    # All files of a tree have the damage of its table. A dict, because it has an order.
    found = {}
    for path, record in manifest.files.items():
        # A Merkle digest is computed from the slices' digests.
        if has_merkle_digest(record):
            continue
        try:
            slices = contents.slices(path)
        except CheckpointUnusable as error:
            found.update(dict.fromkeys(error.problems))
            slices = contents.listed(path)
        with contextlib.suppress(OSError, ValueError):
            wrong = damaged(checkpoint, path, slices)
            if wrong and file_record(checkpoint / path) == record:
                value = ", ".join(map(str, wrong))
                what = "the manifest's digests disagree"
                found[Problem(what, str(checkpoint / path), value, TAKE_ANOTHER)] = None
    try:
        for path in unlisted_files(checkpoint, manifest):
            what = "a file that the manifest does not name"
            hint = "remove it if it is not yours; nothing reads it"
            found[Problem(what, str(checkpoint / path), "", hint)] = None
    except OSError as error:
        hint = "check the permissions and the disk"
        found[os_problem(error, "a directory cannot be read", hint=hint)] = None
    return list(found)


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


def files_covered_by_slices(root: Path, manifest: Manifest) -> set[str]:
    """Return the files that consist of exactly the header that a save writes, and slices up to the end. A file that
    several ranks wrote is returned if its header matches its digest.

    The digests of their slices then verify every byte after the header, so the digest of the file needs no second
    read. A file that cannot be read, or has another header, is not among them.
    """
    slices_by_file: dict[str, list[tuple[Slice, Shape]]] = {}
    for tree in manifest.trees.values():
        for tensor in tree.tensors.values():
            for stored in tensor.slices:
                slices_by_file.setdefault(stored.file, []).append((stored, tensor.shape))
    covered = set()
    for path, slices in slices_by_file.items():
        record = manifest.files[path]
        if has_merkle_digest(record):
            filled = [FileSlice(stored, shape) for stored, shape in slices if stored.nbytes]
            filled.sort(key=lambda one: (one.stored.start, one.stored.offsets))
            with contextlib.suppress(OSError):
                if head_fits(root, path, record, filled):
                    covered.add(path)
        elif _is_covered(root, path, slices, record.size):
            covered.add(path)
    return covered


def _is_covered(
    root: Path, path: str, slices: Iterable[tuple[Slice, Shape]], file_bytes: int
) -> bool:
    # An empty slice begins where the next one does, and comes first in the header.
    ordered = sorted(slices, key=lambda item: (item[0].start, item[0].nbytes))
    try:
        header, starts = shard_header(ordered)
    except ValueError:
        return False
    # Byte by byte: a header that only parses to the same values could differ in bytes that no
    # digest of a slice covers.
    if not begins_with(root, path, header):
        return False
    if any(starts[stored.fqn] != stored.start for stored, _ in ordered):
        return False
    end = max(stored.start + stored.nbytes for stored, _ in ordered)
    return end == file_bytes
