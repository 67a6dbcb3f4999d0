"""Asynchronous checkpointing on one rank: copy its state into shared host memory and write it in another process.

The memory is allocated, and every page touched, before the first save, and reused by all saves. It is a memfd, so that
nothing can be left in ``/dev/shm``.

At most one save is written at a time. No collective is called here; ``saving/async_saves.py`` coordinates the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files.threads import cores_of_rank, started_pool
from automodel_ckpt.checkpoint.formats.planning import Fetch
from automodel_ckpt.checkpoint.jobs.jobs import Blocks, Data, FileJob, RankManifest, Span, with_data
from automodel_ckpt.checkpoint.jobs.reuse import Previous
from automodel_ckpt.checkpoint.jobs.writer import Command, Export, Write, Writer
from automodel_ckpt.checkpoint.parts.failures import SAME_COMMAND, STALLED, as_failure
from automodel_ckpt.checkpoint.parts.tree import Blob
from automodel_ckpt.errors import AutomodelError, ExportFailed, SaveFailed

log = logging.getLogger("automodel_ckpt")

PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PART_BYTES = 64 << 20
"""Memory that a thread allocates in one call."""
# Memory that is left to the rest of the process: an exhausted system kills a process instead of raising an error.
_RESERVE_BYTES = 64 << 20


class HostMemory:
    """Memory that a writer process can share; it grows on demand and is released only by :meth:`close`.

    *on_cuda*: it is registered with CUDA, where that is possible, so that copies from the device are asynchronous.
    """

    def __init__(self, *, on_cuda: bool = False) -> None:
        self.descriptor = os.memfd_create("automodel_ckpt", os.MFD_CLOEXEC)
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._view = memoryview(b"")
        self._locks_pages, self._is_locked = on_cuda, False

    def reserve(self, nbytes: int) -> None:
        """Ensure that at least *nbytes* are allocated. Raises :class:`OSError` where the system does not have them."""
        wanted = _round_up(nbytes)
        if wanted <= self.tensor.nbytes:
            return
        free = available_bytes()
        if free is not None and wanted - self.tensor.nbytes + _RESERVE_BYTES > free:
            raise OSError(
                errno.ENOMEM,
                f"a copy of this rank's state needs {wanted} bytes of host memory, {free} are available",
            )
        self._release()
        # The memfd grows and keeps its contents. A new one would lose the constants of a kept
        # layout, which are written only once.
        os.ftruncate(self.descriptor, wanted)
        mapped = mmap.mmap(self.descriptor, wanted)
        _touch_all_pages(mapped)
        self._view = memoryview(mapped)
        self.tensor = torch.frombuffer(self._view, dtype=torch.uint8)
        # After the first failure, which is logged, nothing is locked.
        self._locks_pages = self._is_locked = self._locks_pages and lock_pages(self.tensor)

    @torch.no_grad()
    def fill(self, layout: MemoryLayout) -> list[tuple[Tensor, Tensor]]:
        """Write the constants of *layout*; return (target, source) of each tensor to be copied."""
        for start, data in layout.constants:
            self._view[start : start + len(data)] = data
        layout.constants = []
        sources = [fetch.tensor() for _, fetch in layout.tensors]
        # The views stay valid, and are reused by later saves, until the memory is reallocated.
        if layout.memory is not self.tensor:
            places = zip(layout.tensors, sources, strict=True)
            layout.targets = [self._tensor_at(start, source) for (start, _), source in places]
            layout.memory = self.tensor
        pairs = zip(layout.targets, sources, strict=True)
        return [(target, source) for target, source in pairs if source.nbytes]

    def _tensor_at(self, start: int, source: Tensor) -> Tensor:
        """The memory from byte *start* as a tensor with the shape and dtype of *source*."""
        if source.numel() == 0:
            # torch.frombuffer rejects a count of 0 (torch 2.13).
            return torch.empty_like(source, device="cpu")
        flat = torch.frombuffer(self._view, dtype=source.dtype, count=source.numel(), offset=start)
        return flat.view(source.shape)

    def _release(self) -> None:
        if self._is_locked:
            self._is_locked = False
            unlock_pages(self.tensor)
        self.tensor, self._view = torch.empty(0, dtype=torch.uint8, device="cpu"), memoryview(b"")

    def close(self) -> None:
        self._release()
        os.close(self.descriptor)


def lock_pages(tensor: Tensor) -> bool:
    """Register the memory of a CPU tensor with CUDA, so that copies from the device are asynchronous and fast.

    A process may lock only so many bytes (``ulimit -l``), and containers and sandboxes such as gVisor may lock none.
    Copies to ordinary memory give the same bytes, but the host waits for them. Returns False then, after a log line.
    """
    try:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        reason = f"cudaHostRegister returned error {status}" if status else ""
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:160]
    if not reason:
        return True
    log.warning(
        "cannot page-lock %s for asynchronous saves (%s): training waits longer for each copy, see `ulimit -l`",
        size_text(tensor.nbytes),
        reason,
    )
    if torch.cuda.is_available():
        # CUDA's last error would be reported for the next kernel of the training. torch has no binding of
        # cudaGetLastError, but calls it after each kernel that it starts.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
    return False


def unlock_pages(tensor: Tensor) -> None:
    """Unlock what :func:`lock_pages` has locked. Raises RuntimeError if CUDA cannot."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if status := int(cudart.cudaHostUnregister(tensor.data_ptr())):
        raise RuntimeError(f"cudaHostUnregister returned error {status}")


def _round_up(nbytes: int) -> int:
    """*nbytes*, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _touch_all_pages(mapped: mmap.mmap) -> None:
    """Make the kernel allocate every page now: otherwise the first copy takes ten times as long as the next.

    In all cores of this rank, because the kernel fills 1 to 4 GB per second in one thread.
    """
    starts = range(0, len(mapped), _PART_BYTES)
    num_threads = min(cores_of_rank(), len(starts))
    pool = started_pool(num_threads, "automodel_ckpt memory") if num_threads > 1 else None
    if pool is None:
        for start in starts:
            _touch_part(mapped, start)
        return
    try:
        # `list` raises what a thread raised.
        list(pool.map(functools.partial(_touch_part, mapped), starts))
    finally:
        # After Ctrl+C, the parts that have not begun are left out. A thread that went on could overwrite the next save.
        pool.end()


def _touch_part(mapped: mmap.mmap, start: int) -> None:
    """Make the kernel allocate the pages of one part of *mapped*, from byte *start* on."""
    nbytes = min(_PART_BYTES, len(mapped) - start)
    # mmap.madvise keeps the GIL (Python 3.11), so that other threads and Ctrl+C would wait for seconds.
    first = ctypes.byref(ctypes.c_char.from_buffer(mapped, start))
    if ctypes.CDLL(None).madvise(first, ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
        # An older kernel.
        pages = slice(start, start + nbytes, PAGE_BYTES)
        mapped[pages] = mapped[pages]


def available_bytes() -> int | None:
    """Host memory in bytes available without swapping, within the cgroup limit; None where it is unknown."""
    limits = []
    with contextlib.suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        if match := re.search(r"^MemAvailable: *(\d+) kB", text, re.MULTILINE):
            limits.append(int(match[1]) * 1024)
    # cgroup v2. In a container this is the container's own group; the root group of a host has no memory.max, and
    # without a limit it is "max". memory.current includes reclaimable page cache, so the result is a lower bound.
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        limits.append(limit - int((group / "memory.current").read_text()))
    return min(limits, default=None)


@dataclass(slots=True)
class MemoryLayout:
    """The positions in shared memory, up to byte *end*, of all data of *jobs*.

    *tensors* are copied at every staging, *constants* only once. *values* has the position of each value that is not a
    tensor, by (tree, name). *targets* are views of *memory* for the tensors.
    """

    jobs: list[FileJob]
    end: int
    tensors: list[tuple[int, Fetch]] = field(default_factory=list)
    constants: list[tuple[int, bytes | memoryview]] = field(default_factory=list)
    values: dict[tuple[str, str], Span] = field(default_factory=dict)
    targets: list[Tensor] = field(default_factory=list)
    memory: Tensor | None = None
    pickled: bytes = b""

    def packed(self) -> bytes:
        """The pickled jobs for the writer process; pickled only once."""
        self.pickled = self.pickled or pickle.dumps(self.jobs)
        return self.pickled

    def replace(self, name: tuple[str, str], data: bytes) -> bool:
        """Set the bytes of a value for the next staging; return False where their size has changed."""
        span = self.values[name]
        self.constants.append((span.start, data))
        return len(data) == span.nbytes


def lay_out(jobs: Sequence[FileJob], after: int = 0) -> MemoryLayout:
    """Assign positions from byte *after* on to all data of *jobs*.

    Bytes that are consecutive in a file are consecutive in memory, at the same offset within a page, so that they can
    be written with O_DIRECT. A tensor with several positions in files is copied only once.
    """
    layout = MemoryLayout([], after)
    # By identity: a tensor with several positions in files has one Fetch.
    copied: dict[int, Span] = {}
    for job in jobs:
        spans = []
        next_offset = -1
        for chunk in job.chunks:
            span = copied.get(id(chunk.data)) if isinstance(chunk.data, Fetch) else None
            if span is None:
                if chunk.start != next_offset:
                    layout.end = _round_up(layout.end) + chunk.start % PAGE_BYTES
                span = _append(layout, chunk.data)
                if isinstance(chunk.data, Fetch):
                    copied[id(chunk.data)] = span
                next_offset = chunk.start + span.nbytes
            spans.append(span)
        layout.jobs.append(with_data(job, spans))
        layout.values.update(_values(job, spans))
    return layout


def _append(layout: MemoryLayout, data: Data) -> Span:
    """Append *data* to the layout and return its position."""
    if isinstance(data, Fetch):
        layout.tensors.append((layout.end, data))
        span = Span(layout.end, data.nbytes)
    else:
        constant = data() if callable(data) else data
        assert not isinstance(constant, Span | Blocks), (
            "the data must be in this process, and no copy"
        )
        layout.constants.append((layout.end, constant))
        span = Span(layout.end, len(constant))
    layout.end += span.nbytes
    return span


def _values(job: FileJob, spans: Sequence[Span]) -> Iterator[tuple[tuple[str, str], Span]]:
    """((tree, name), position) of each value of *job* that is not a tensor."""
    if job.tree is None:
        return
    for chunk, span in zip(job.chunks, spans, strict=True):
        if isinstance(chunk.entry, Blob):
            yield (job.tree, chunk.entry.fqn), span


_END_SECONDS = 10.0
_LONGEST_POLL_SECONDS = 10.0
"""The most that one observation adds to the time without progress. Ranks exchange theirs several times per second."""

State = Literal["idle", "busy", "failed"]
"""The state of the save. The thread of a failed one may still be running."""


class Background:
    """This rank's writer process, the memory that it writes from, and the save in progress, if there is one."""

    def __init__(self, *, on_cuda: bool = False) -> None:
        """Start the writer process. Raises :class:`OSError` where this system does not support it."""
        self._memory = HostMemory(on_cuda=on_cuda)
        self._writer = Writer(self._memory.descriptor)
        self._stream = torch.cuda.Stream() if on_cuda else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._task = SaveTask(self._writer)
        self._failure: AutomodelError | None = None
        self._activity: tuple[bytes, ...] = ()
        self._observed_at = self._idle_seconds = 0.0
        self._exports_disabled = threading.Event()
        self._exporting = threading.Lock()
        self._staged_bytes = 0

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes written, approximate total bytes) of the save that is being written."""
        return self._writer.progress, self._staged_bytes

    @property
    def writer_pid(self) -> int:
        return self._writer.pid

    @property
    def state(self) -> State:
        if self._failure is not None:
            return "failed"
        return "idle" if self._task.has_ended.is_set() else "busy"

    @property
    def is_writing(self) -> bool:
        """Whether the writer process runs a command of the current save."""
        return self._task.is_writing

    def reserve(self, nbytes: int) -> None:
        """Allocate *nbytes* of host memory before the first save. Raises :class:`OSError` where there is not enough."""
        self._memory.reserve(nbytes)

    # ---------------------------------------------------------------- copy

    def stage(
        self, layouts: Sequence[MemoryLayout], *, copy_now: Collection[int] = ()
    ) -> list[bytes]:
        """Copy the state that *layouts* describe; return their pickled jobs for :meth:`start`.

        On CUDA the copies may still be in progress on return: the state may change only after :meth:`await_copies`.
        Tensors with a data pointer in *copy_now* are copied before the return. Raises :class:`OSError` where memory
        is short.
        """
        self._staged_bytes = max(layout.end for layout in layouts)
        self._memory.reserve(self._staged_bytes)
        pairs = []
        for layout in layouts:
            pairs += self._memory.fill(layout)
        if self._stream is None:
            _copy(pairs)
        else:
            self._copy_from_device(pairs, copy_now)
        return [layout.packed() for layout in layouts]

    def _copy_from_device(
        self, pairs: Sequence[tuple[Tensor, Tensor]], copy_now: Collection[int]
    ) -> None:
        """Copy on a separate CUDA stream, concurrently with the next forward and backward pass.

        Tensors that those passes change (their data pointers are in *copy_now*) are copied on the current stream.
        """
        assert self._stream is not None
        now, later = [], []
        for target, source in pairs:
            if source.is_cuda and source.data_ptr() not in copy_now:
                later.append((target, source))
            else:
                now.append((target, source))
        _copy(now)
        # The copies begin after the kernels that compute the present state.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(later)
            for _, source in later:
                # Keeps the allocator from reusing the memory of a temporary tensor before it is copied.
                source.record_stream(self._stream)
            # Also covers the copies on the current stream, which this stream waits for
            # (wait_stream).
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)

    def await_copies(self) -> None:
        """Make the current CUDA stream wait for the copies, so that later kernels do not change uncopied state."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    # ---------------------------------------------------------------- write

    def fail(self, failure: AutomodelError) -> None:
        """Mark the save as failed with *failure*, because its state could not be copied."""
        self._failure = failure

    def start(
        self,
        staging: Path,
        written: RankManifest,
        jobs: Sequence[bytes],
        *,
        then: Callable[[SaveTask], None] | None,
        doing: str,
        previous: Previous | None = None,
    ) -> None:
        """Write the staged copy in the background, then call *then* with the task in the thread of saves.

        The previous save must have ended, or be abandoned. Unchanged files are shared with the checkpoint *previous*.
        *doing* describes the save in error messages. Raises :class:`OSError` where the writer process has ended and
        cannot be restarted.
        """
        if not self._writer.is_alive:
            self._writer.end()
            self._writer = Writer(self._memory.descriptor)
        command = Write(str(staging), written, jobs, self._memory.tensor.nbytes, previous)
        self._activity, self._idle_seconds, self._observed_at = (), 0.0, time.monotonic()
        task = SaveTask(self._writer)
        # Not in the thread: a caller that waits right after this must find the save in progress.
        task.has_ended.clear()
        self._task = task
        arguments = (task, command, then, doing)
        threading.Thread(target=self._run, args=arguments, name="save", daemon=True).start()

    def _run(
        self, task: SaveTask, command: Write, then: Callable[[SaveTask], None] | None, doing: str
    ) -> None:
        try:
            if self._copied is not None:
                # The writer reads the memory as soon as it has the command.
                self._copied.synchronize()
            task.do(command, Path(command.staging))
            if then is not None:
                then(task)
        except Exception as error:
            # The writer of an abandoned save was killed: that is a consequence, not a failure.
            if not task.abandoned.is_set():
                self._failure = as_failure(error, doing, Path(command.staging))
        finally:
            if task.writer is not self._writer:
                task.writer.end()
            task.has_ended.set()

    def export(
        self, task: SaveTask, sources: Sequence[Path], lease: tuple[Path, str] | None
    ) -> tuple[str, list[str]]:
        """Export the model directories *sources* in the writer process; return (last output directory, log lines).

        Called in the thread of *task*. *lease* is (lock file, token) of the run. Raises :class:`Cancelled` after
        :meth:`disable_exports`.
        """
        # Held during an export only: disable_exports must not kill a writer that writes a
        # checkpoint.
        with self._exporting:
            try:
                if self._exports_disabled.is_set():
                    raise Cancelled
                command = Export([str(source) for source in sources], lease)
                answer: tuple[str, list[str]] = task.do(command, sources[0])
                return answer
            except Exception as error:
                if self._exports_disabled.is_set():
                    raise Cancelled from error
                raise

    def disable_exports(self) -> None:
        """Make no more exports, and stop one in progress. Its checkpoint is already published."""
        # The flag comes first. `export` takes the lock and then reads the flag, so that either it
        # stops there, or the lock is seen here.
        self._exports_disabled.set()
        if self._exporting.locked():
            self._writer.kill()

    def idle_seconds(self) -> float:
        """Seconds since the writer process last made progress, as observed by calls of this method.

        A long time between two calls counts as _LONGEST_POLL_SECONDS: the job was suspended, and the writer with it.
        """
        now, activity = time.monotonic(), self._writer.activity()
        if activity != self._activity:
            self._activity, self._idle_seconds = activity, 0.0
        else:
            self._idle_seconds += min(now - self._observed_at, _LONGEST_POLL_SECONDS)
        self._observed_at = now
        return self._idle_seconds

    def give_up(self) -> None:
        """Mark the save, if there is one in progress, as failed because it made no progress for too long."""
        if self.state != "busy":
            return
        what = "publishing made no progress"
        if self.is_writing:
            what = "the process that writes this rank's checkpoints made no progress"
        kind = ExportFailed if self._exporting.locked() else SaveFailed
        seconds = f"{self.idle_seconds():.0f} s (distributed.timeout_minutes)"
        self._failure = kind(
            what,
            where=self._task.where,
            value=f"process {self.writer_pid}: none for {seconds}",
            hint=STALLED,
            restart=SAME_COMMAND,
        )

    def wait(self, seconds: float | None = None) -> None:
        """Return when the save has ended, or after so many seconds."""
        self._task.has_ended.wait(seconds)

    def abandon(self) -> AutomodelError | None:
        """Stop the save and prepare for the next one. Returns the failure of the save, or None.

        Raises OSError where a new writer process is needed and cannot be started.
        """
        self._task.abandoned.set()
        if not self._task.has_ended.is_set():
            self._writer.kill()
            self.wait(_END_SECONDS)
            # The thread may be in a call that cannot be interrupted. It ends when the call returns: its task stays
            # abandoned, and its writer dead.
            if not self._task.has_ended.is_set():
                self._writer = Writer(self._memory.descriptor)
                self._task = SaveTask(self._writer)
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait for the save, then end the writer process and release the memory."""
        self.wait()
        self._writer.end()
        self._memory.close()


class SaveTask:
    """One save that is being written: what its thread asks of the writer process.

    An abandoned task stays abandoned. Its thread can return from a disk that did not respond while the next save is
    in progress, and must not touch that one's writer or state.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.has_ended = threading.Event()
        self.has_ended.set()
        # Once set, :meth:`pause` and :meth:`do` raise.
        self.abandoned = threading.Event()
        self.where = Path()
        self.is_writing = False

    def pause(self, seconds: float) -> None:
        """Wait for *seconds*. Raises :class:`Cancelled` when the task has been abandoned."""
        if self.abandoned.wait(seconds):
            raise Cancelled

    def do(self, command: Command, where: Path) -> Any:
        """Run *command*, which is about the directory *where*, in the writer process and return its result.

        Raises :class:`Cancelled` when the task has been abandoned, else what :meth:`Writer.run` raises.
        """
        if self.abandoned.is_set():
            raise Cancelled
        self.where, self.is_writing = where, True
        try:
            return self.writer.run(command)
        finally:
            self.is_writing = False


class Cancelled(Exception):
    """The save was abandoned, or its export was disabled."""


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not pairs:
        return
    targets = [target for target, _ in pairs]
    sources = [source for _, source in pairs]
    # One call for all: a copy_ per tensor would take the GIL thousands of times.
    torch._foreach_copy_(targets, sources, non_blocking=True)
