"""The shared memory that a rank's state is copied into for its writer process, and its layout.

It is allocated, and every page touched, before the first save, and reused by all saves. It is a memfd, so that nothing
can be left in ``/dev/shm``.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files.threads import cores_of_rank, started_pool
from automodel_ckpt.checkpoint.formats.planning import Fetch
from automodel_ckpt.checkpoint.jobs.jobs import Blocks, Data, FileJob, Span, with_data
from automodel_ckpt.checkpoint.parts.tree import Blob

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
