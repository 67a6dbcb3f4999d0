"""The memory that a rank's state is copied into for its writer process, and where in it everything goes.

It is allocated, and every page of it touched, before the first save, and all saves use it; the writer process shares
it (a memfd: nothing can be left in ``/dev/shm``).
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.checkpoint.formats.planning import Fetch
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.writing.jobs import Data, FileJob, Job, Span

PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_ROOM_BYTES = 64 << 20


class HostMemory:
    """Memory that a writer process can share: it grows when it has to, and is never given back before :meth:`close`.

    For CUDA it is pinned, so that copies from the device need not be waited for.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.descriptor = os.memfd_create("automodel_ckpt", os.MFD_CLOEXEC)
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")
        self._pinned = pinned

    def reserve(self, nbytes: int) -> None:
        """Have at least this much. Raises :class:`OSError` where the machine has not."""
        wanted = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if wanted <= self.tensor.nbytes:
            return
        free = available_bytes()
        if free is not None and wanted - self.tensor.nbytes + _ROOM_BYTES > free:
            raise OSError(12, f"a copy of this rank's state needs {wanted} bytes of host memory, {free} are available")
        self._release()
        os.ftruncate(self.descriptor, wanted)
        self._view = memoryview(_faulted_in(mmap.mmap(self.descriptor, wanted)))
        self.tensor = torch.frombuffer(self._view, dtype=torch.uint8)
        if self._pinned:
            torch.cuda.check_error(int(_cudart().cudaHostRegister(self.tensor.data_ptr(), wanted, 0)))

    @torch.no_grad()
    def filled(self, layout: MemoryLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put a layout's constants in their places; what is left to be copied: (target, source) of each tensor."""
        for start, data in layout.constants:
            self._view[start : start + len(data)] = data
        layout.constants = []
        sources = [fetch.tensor() for _, fetch in layout.tensors]
        if layout.memory is not self.tensor:
            places = [start for start, _ in layout.tensors]
            layout.targets = [self._place(*one) for one in zip(places, sources, strict=True)]
            layout.memory = self.tensor
        return [pair for pair in zip(layout.targets, sources, strict=True) if pair[1].nbytes]

    def _place(self, start: int, source: torch.Tensor) -> torch.Tensor:
        """Memory from *start*, as a tensor like the source."""
        if source.numel() == 0:
            return torch.empty_like(source, device="cpu")
        return torch.frombuffer(self._view, dtype=source.dtype, count=source.numel(), offset=start).view(source.shape)

    def _release(self) -> None:
        if self._pinned and self.tensor.nbytes:
            torch.cuda.check_error(int(_cudart().cudaHostUnregister(self.tensor.data_ptr())))
        self.tensor, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")

    def close(self) -> None:
        self._release()
        os.close(self.descriptor)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _faulted_in(mapped: mmap.mmap) -> mmap.mmap:
    """Touch every page now: the first copy would take ten times as long as the next."""
    try:
        mapped.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        mapped[::PAGE_BYTES] = mapped[::PAGE_BYTES]
    return mapped


def available_bytes() -> int | None:
    """Host memory that can be taken without swapping, within the limit of this process's control group; None where
    the system does not say."""
    limits = []
    try:
        with open("/proc/meminfo") as file:
            limits += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        pass
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            limits.append(int(most) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(limits, default=None)


@dataclass(slots=True)
class MemoryLayout:
    """Jobs over a stretch of the memory up to *end*, and what has to be copied there.

    *tensors* are copied at every staging, *constants* once (those of a layout that is staged again are there already).
    *values* says where the bytes of each value that is no tensor stand, by tree and name. *targets* are the places of
    the tensors in *memory*.
    """

    jobs: list[Job]
    end: int
    tensors: list[tuple[int, Fetch]] = field(default_factory=list)
    constants: list[tuple[int, bytes | memoryview]] = field(default_factory=list)
    values: dict[tuple[str, str], Span] = field(default_factory=dict)
    targets: list[torch.Tensor] = field(default_factory=list)
    memory: torch.Tensor | None = None
    pickled: bytes = b""

    def packed(self) -> bytes:
        """The jobs for the writer, pickled once."""
        self.pickled = self.pickled or pickle.dumps(self.jobs)
        return self.pickled

    def replace(self, name: tuple[str, str], data: bytes) -> bool:
        """Let a value have other bytes at the next staging; False where they do not fit its place."""
        span = self.values[name]
        self.constants.append((span.start, data))
        return len(data) == span.nbytes


def lay_out(jobs: Sequence[Job], after: int = 0) -> MemoryLayout:
    """Places behind the byte *after* for all that the jobs take. What follows on each other in a file does in memory,
    and stands at the same place of a page, so that it can go to disk from there. Data that go to several places are
    copied once."""
    layout = MemoryLayout([], after)
    known: dict[int, Span] = {}
    for job in jobs:
        spans: list[Span] = []
        follows = -1
        for start, data in job.data():
            span = known.get(id(data)) if isinstance(data, Fetch) else None
            if span is None:
                if start != follows:
                    layout.end = -(-layout.end // PAGE_BYTES) * PAGE_BYTES + start % PAGE_BYTES
                span = known[id(data)] = _laid(layout, data)
                follows = start + span.nbytes
            spans.append(span)
        layout.jobs.append(job.over(spans))
        layout.values.update(_values(job, spans))
    return layout


def _laid(layout: MemoryLayout, data: Data) -> Span:
    """The place of these data, behind all others."""
    if isinstance(data, Fetch):
        layout.tensors.append((layout.end, data))
        span = Span(layout.end, data.nbytes)
    else:
        constant = data if isinstance(data, bytes) else _fetched(data)
        layout.constants.append((layout.end, constant))
        span = Span(layout.end, len(constant))
    layout.end += span.nbytes
    return span


def _values(job: Job, spans: Sequence[Span]) -> Iterator[tuple[tuple[str, str], Span]]:
    if isinstance(job, FileJob) and job.tree is not None:
        for piece, span in zip(job.pieces, spans, strict=True):
            if isinstance(piece.entry, Blob):
                yield (job.tree, piece.entry.fqn), span


def _fetched(data: Span | Callable[[], memoryview]) -> memoryview:
    assert not isinstance(data, Span), "the data are a copy already"
    return data()
