"""Moves the bytes of a plan: in the kernel where they lie in one piece, through small fixed buffers where they do not.

Work is split by bytes, not by files: every task is at most a few ten megabytes, and threads (and processes, each with
its threads) share the tasks of one large file as they share many files. Nothing grows with the size of the model.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from automodel_ckpt.checkpoint.export_plan import Gather, Move, blocks
from automodel_ckpt.checkpoint.inside import open_regular
from automodel_ckpt.checkpoint.slices import DTYPE_BITS, Box, Slice, Tensor, intersection
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.float_cast import Array

_COPY_BYTES = 64 << 10
# What says "not this way, for these two files"; anything else (EIO, ENOSPC) is a failure.
_NOT_THIS_WAY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY}


class Sized(Protocol):
    """A task that knows how many bytes it is about."""

    @property
    def nbytes(self) -> int: ...


TaskT = TypeVar("TaskT", bound=Sized)


@dataclass(frozen=True, slots=True)
class Workers:
    """How many processes work at once, and how many threads each has."""

    num_procs: int = 1
    num_threads: int = 5

    def run(self, function: Callable[[TaskT], object], tasks: Sequence[TaskT]) -> None:
        """Call *function* on every task; the first exception is raised when all running calls have ended.

        With several processes the function and the tasks are pickled, and the calling process is forked: it must not
        have threads of its own.
        """
        if self.num_procs <= 1 or len(tasks) <= 1:
            _run_threads(function, self.num_threads, tasks)
            return
        import multiprocessing

        shares = _shares(tasks, self.num_procs)
        context = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(len(shares), context, _die_with_parent) as executor:
                _run_all(executor, partial(_run_threads, function, self.num_threads), shares)
        except BrokenExecutor as error:
            raise SaveFailed(
                "a worker process was killed", where="consolidation", value=f"one of {len(shares)}",
                remedy="look for a memory limit in the system's log; use fewer processes",
            ) from error  # fmt: skip


def _run_threads(function: Callable[[Any], object], num_threads: int, tasks: Sequence[Any]) -> None:
    if num_threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            function(task)
        return
    with ThreadPoolExecutor(min(num_threads, len(tasks)), "consolidate") as executor:
        _run_all(executor, function, tasks)


def _run_all(executor: Executor, function: Callable[[Any], object], tasks: Sequence[Any]) -> None:
    futures = [executor.submit(function, task) for task in tasks]
    done, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    for future in done:
        future.result()


def _shares(tasks: Sequence[TaskT], count: int) -> list[list[TaskT]]:
    """The tasks in at most *count* consecutive shares of about equal bytes: each process reads and writes in order."""
    total = sum(task.nbytes for task in tasks) or 1
    shares: list[list[TaskT]] = [[] for _ in range(count)]
    done = 0
    for task in tasks:
        shares[min(count - 1, (done + task.nbytes // 2) * count // total)].append(task)
        done += task.nbytes
    return [share for share in shares if share]


def _die_with_parent() -> None:
    """A worker must not outlive a killed parent: it would wait for work for ever (PR_SET_PDEATHSIG, Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def _damaged(what: str, path: Path, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(
        what, where=str(path), value=value, remedy="restore the file from another copy, or use another checkpoint"
    )


def move(root: Path, staging: Path, task: Move) -> None:
    """Carry out a :class:`Move` from the source under *root* into the output under *staging*."""
    source = open_regular(root / task.file)
    try:
        target = os.open(staging / task.target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _copy(source, task.start, target, task.target_start, task.nbytes, root / task.file)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy(source: int, start: int, target: int, target_start: int, nbytes: int, path: Path) -> None:
    ways = [_by_copy_file_range, _by_sendfile, _by_buffer]
    done = 0
    while done < nbytes:
        try:
            count = ways[0](source, start + done, target, target_start + done, nbytes - done)
        except OSError as error:
            if len(ways) == 1 or error.errno not in _NOT_THIS_WAY:
                raise
            del ways[0]
            continue
        if count == 0:
            raise _damaged("a file ended before its slices did", path, f"at byte {start + done}")
        done += count


def _by_copy_file_range(source: int, start: int, target: int, target_start: int, nbytes: int) -> int:
    return os.copy_file_range(source, target, nbytes, start, target_start)


def _by_sendfile(source: int, start: int, target: int, target_start: int, nbytes: int) -> int:
    os.lseek(target, target_start, os.SEEK_SET)
    return os.sendfile(target, source, start, nbytes)


def _by_buffer(source: int, start: int, target: int, target_start: int, nbytes: int) -> int:
    data = os.pread(source, min(nbytes, _COPY_BYTES), start)
    write_at(target, data, target_start)
    return len(data)


def create_output(path: Path, header: bytes, nbytes: int) -> int:
    """A new file of *nbytes* that begins with *header*; its space is reserved now, so that a full disk shows now.

    Returns a descriptor, to be fsynced and closed. Raises OSError naming the file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in _NOT_THIS_WAY:
                raise
            os.ftruncate(descriptor, nbytes)
        write_at(descriptor, header, 0)
    except OSError as error:
        os.close(descriptor)
        error.filename = str(path)
        raise
    return descriptor


def write_at(descriptor: int, data: bytes | memoryview, start: int) -> None:
    """Write all of *data* at byte *start*, whatever part of it a single call takes."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, start)
        view, start = view[count:], start + count


def gather(root: Path, staging: Path, task: Gather) -> None:
    """Carry out a :class:`Gather`: block by block, from the mapped slices through one buffer into the output."""
    maps = [(piece, _mapped(root, piece)) for piece in task.tensor.slices if piece.nbytes]
    itemsize = DTYPE_BITS[task.dtype] // 8
    target = os.open(staging / task.target, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for box in blocks(task.tensor.shape, task.first, task.last):
            data = _assembled(task.tensor, task.dtype, box, maps)
            at = task.target_start + _flat(box.offsets, task.tensor.shape) * itemsize
            write_at(target, data.reshape(-1).view("u1").data, at)
    finally:
        os.close(target)


def _mapped(root: Path, piece: Slice) -> Array:
    import numpy as np

    from automodel_ckpt.checkpoint.float_cast import storage_dtype

    dtype = storage_dtype(piece.dtype, DTYPE_BITS[piece.dtype])
    array: Array = np.memmap(root / piece.file, dtype, "r", piece.start, piece.sizes or (1,))
    return array.reshape(piece.sizes)


def _assembled(tensor: Tensor, dtype: str, box: Box, maps: Sequence[tuple[Slice, Array]]) -> Array:
    import numpy as np

    from automodel_ckpt.checkpoint.float_cast import cast, storage_dtype

    result = np.empty(box.sizes, storage_dtype(dtype, DTYPE_BITS[dtype]))
    for piece, values in maps:
        common = Box((), ()) if not tensor.shape else intersection(piece.box, box)
        if common is not None:
            result[_within(common, box)] = cast(values[_within(common, piece.box)], tensor.dtype, dtype)
    return result


def _within(common: Box, box: Box) -> tuple[slice, ...]:
    triples = zip(common.offsets, common.sizes, box.offsets, strict=True)
    return tuple(slice(offset - origin, offset - origin + size) for offset, size, origin in triples)


def _flat(offsets: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for offset, size in zip(offsets, shape, strict=True):
        index = index * size + offset
    return index
