"""Verify that the files of a checkpoint match its manifest: their slices, digests and Merkle digests. No torch.

The digest of a file in which several ranks wrote slices is computed from theirs. It is the XXH3-128 of a text: a line
with the digest of the bytes before the first slice, then a line ``START OFFSETS NBYTES DIGEST`` for each slice that is
not empty, in the order of start and offsets (decimal; offsets joined by commas; DIGEST with the name of its algorithm).
The manifest has the slices' digests.
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import OF_SLICES, FileRecord, digest_from
from automodel_ckpt.checkpoint.files.durable_file import digest_range, file_record
from automodel_ckpt.checkpoint.files.safe_open import is_sparse, link_on_the_way, open_safely
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import Slice, runs_in_file
from automodel_ckpt.checkpoint.parts.tree import Tree, in_rank_files, slices_in_rank_file
from automodel_ckpt.errors import CheckpointUnusable, Problem, os_problem

_NAMED = 5


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A slice in a file, and the shape of its tensor. A value that is no tensor (*is_value*) is a slice of bytes."""

    stored: Slice
    shape: tuple[int, ...]
    is_value: bool = False

    def __str__(self) -> str:
        if self.is_value:
            return f"value {self.stored.fqn}"
        return f"tensor {self.stored.fqn} (slice at {list(self.stored.offsets)})"


class FileContents:
    """The slices and values of *trees* that are not empty, by file.

    Of a slice table, only the rows of the ranks that wrote a file are read, when that file is asked for.
    """

    def __init__(self, trees: Iterable[Tree]) -> None:
        self._trees = tuple(trees)
        self._listed: dict[str, list[FileSlice]] = {}
        for tree in self._trees:
            for tensor in tree.stored:
                for stored in () if in_rank_files(tensor) else tensor.slices:
                    self._add(FileSlice(stored, tensor.shape))
            for blob in tree.objects.values():
                size = (blob.nbytes,)
                value = Slice(
                    blob.fqn, "U8", (0,), size, blob.file, blob.start, blob.nbytes, blob.digest
                )
                self._add(FileSlice(value, size, is_value=True))

    def _add(self, one: FileSlice) -> None:
        if one.stored.nbytes:
            self._listed.setdefault(one.stored.file, []).append(one)

    def listed(self, file: str) -> list[FileSlice]:
        """Return those in a file that no table describes, in the order of its Merkle digest."""
        return sorted(self._listed.get(file, ()), key=_place)

    def slices(self, file: str) -> list[FileSlice]:
        """Return those in a file in their order. Raises :class:`CheckpointUnusable` for a damaged table."""
        found = list(self._listed.get(file, ()))
        for tree in self._trees:
            for tensor, stored in slices_in_rank_file(tree, file):
                if stored.nbytes:
                    found.append(FileSlice(stored, tensor.shape))
        return sorted(found, key=_place)


def _place(one: FileSlice) -> tuple[int, tuple[int, ...]]:
    # Interleaved slices of a tensor have the same start; their offsets order them.
    return one.stored.start, one.stored.offsets


def has_merkle_digest(record: FileRecord) -> bool:
    """Whether the digest of a file is a Merkle digest."""
    return record.digest.startswith(OF_SLICES)


def merkle_digest(head: str, slices: Iterable[FileSlice]) -> str:
    """Compute the digest of a file with these *slices*. *head* is the digest of the bytes before the first one."""
    text = f"{head}\n"
    for one in slices:
        stored = one.stored
        offsets = ",".join(map(str, stored.offsets))
        # The text is part of the format: every reader must get the same bytes (docs/format.md).
        text += f"{stored.start} {offsets} {stored.nbytes} {stored.digest}\n"
    return OF_SLICES + xxhash.xxh3_128_hexdigest(text.encode())


def head_fits(root: Path, path: str, record: FileRecord, slices: Sequence[FileSlice]) -> bool:
    """Whether the bytes before the first slice, and the digests in the manifest, give the file's digest.

    Raises OSError.
    """
    num_bytes = slices[0].stored.start if slices else record.size
    with _opened(root, path) as descriptor:
        _, head = digest_range(descriptor, 0, num_bytes)
    return merkle_digest(head, slices) == record.digest


def damaged(root: Path, path: str, slices: Iterable[FileSlice]) -> list[FileSlice]:
    """Return the slices of a file with bytes that do not match their digests. Raises OSError."""
    with _opened(root, path) as descriptor:
        return [one for one in slices if _digest(descriptor, one) != one.stored.digest]


def damage_text(slices: Sequence[FileSlice]) -> str:
    """Name the damaged slices of a file with a different digest."""
    if not slices:
        return "the damage is in no tensor"
    names = ", ".join(map(str, slices[:_NAMED]))
    more = f", {len(slices) - _NAMED} more" if len(slices) > _NAMED else ""
    return f"damaged: {names}{more}"


@contextlib.contextmanager
def _opened(root: Path, path: str) -> Iterator[int]:
    descriptor = open_safely(root, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _digest(descriptor: int, one: FileSlice) -> str:
    """The digest of the bytes of a slice, row-major."""
    stored = one.stored
    if not stored.interleaved:
        return digest_range(descriptor, stored.start, stored.nbytes)[1]
    hashed = xxhash.xxh3_128()
    # Mapped, because an interleaved slice has many short runs: a system call for each would cost more than reading.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        for run in runs_in_file(stored, one.shape):
            # A mapping with a view of it cannot be closed (BufferError).
            with view[run.source : run.source + run.nbytes] as block:
                hashed.update(block)
    return digest_from(hashed)


Level = Literal["none", "size", "digest"]

_TASK_BYTES = 64 << 20
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
        contents = FileContents(manifest.trees.values())
        problems = _table_problems(checkpoint, manifest) if rank == 0 else []
    except CheckpointUnusable as error:
        return list(error.problems)
    if problems:
        return problems
    mine = _share(_tasks(manifest, contents), rank, num_ranks)
    # A file is in a task of some rank: with thousands of files and ranks, no rank checks all sizes.
    my_files = {task.path for task in mine}
    for path, record in manifest.files.items():
        if path in my_files and (problem := size_problem(checkpoint, path, record)):
            problems.append(problem)
    if problems or level == "size":
        return problems
    with started_pool(num_threads, "verify") or CallingThread() as pool:
        found = pool.map(lambda task: _digest_problem(checkpoint, manifest, contents, task), mine)
        return [problem for problem in found if problem is not None]


def _table_problems(checkpoint: Path, manifest: Manifest) -> list[Problem]:
    """Return the problem of the first table with a file of another size. Raises :class:`CheckpointUnusable` for the
    first table with a head that does not match the tensors."""
    for table in filter(None, (tree.table for tree in manifest.trees.values())):
        # Before the counts, which take memory in proportion to this size. A caller may select some of the files.
        file, *_ = table.location
        if file in manifest.files and (
            problem := size_problem(checkpoint, file, manifest.files[file])
        ):
            return [problem]
        table.check_counts()
    return []


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


def size_problem(checkpoint: Path, path: str, record: FileRecord) -> Problem | None:
    """Return the problem of a file that can be found without reading it; None when there is none."""
    where = checkpoint / path
    if link := link_on_the_way(checkpoint, path):
        return Problem("a checkpoint contains a symbolic link", str(checkpoint / link), path, _HINT)
    what = value = ""
    try:
        status = os.lstat(where)
        if not stat.S_ISREG(status.st_mode):
            what, value = "is not a regular file", stat.filemode(status.st_mode)
        elif status.st_size != record.size:
            what = "has another size"
            value = f"{status.st_size} bytes, {record.size} when it was saved"
        elif is_sparse(status):
            what = "is nearly all hole"
            value = f"{status.st_size} bytes, of which {status.st_blocks * 512} are on the disk"
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        what, value = "is missing" if is_missing else "cannot be read", error.strerror or ""
    return Problem(f"a file of the checkpoint {what}", str(where), value, _HINT) if what else None


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
        return Problem(what, str(checkpoint / path), error.strerror, _HINT)
    what = "a file of the checkpoint is not what was saved: its digest differs"
    return Problem(what, str(checkpoint / path), damage_text(wrong), _HINT)


def verify_deep(checkpoint: Path, manifest: Manifest) -> list[Problem]:
    """Compare what :func:`verify` does not: every slice's own digest, and files that the manifest does not list.

    Exports have different manifests (``export_manifest.py``).
    """
    try:
        contents = FileContents(manifest.trees.values())
    except CheckpointUnusable as error:  # a damaged table
        return list(error.problems)
    problems = []
    # All files of a tree have the damage of its table. A dict, because it has an order.
    of_tables: dict[Problem, None] = {}
    for path, record in manifest.files.items():
        # A Merkle digest is computed from the slices' digests.
        if has_merkle_digest(record):
            continue
        try:
            slices = contents.slices(path)
        except CheckpointUnusable as error:
            of_tables.update(dict.fromkeys(error.problems))
            slices = contents.listed(path)
        with contextlib.suppress(OSError, ValueError):
            wrong = damaged(checkpoint, path, slices)
            if wrong and file_record(checkpoint / path) == record:
                value = ", ".join(map(str, wrong))
                problems.append(
                    Problem("the manifest's digests disagree", str(checkpoint / path), value, _HINT)
                )
    problems = [*of_tables, *problems]
    try:
        for path in unlisted_files(checkpoint, manifest):
            what = "a file that the manifest does not name"
            hint = "remove it if it is not yours; nothing reads it"
            problems.append(Problem(what, str(checkpoint / path), "", hint))
    except OSError as error:
        hint = "check the permissions and the disk"
        problems.append(os_problem(error, "a directory cannot be read", hint=hint))
    return problems


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
