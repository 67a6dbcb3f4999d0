"""Asynchronous saves of one rank: its state is copied into memory of its own, and a process of its own writes it.

The memory is allocated, and every page of it touched, before the first save, and all saves use it; the writer process
shares it (a memfd: nothing can be left in ``/dev/shm``). One upload is under way at a time. No other rank is spoken to.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from automodel_ckpt.checkpoint.discovery import flat_bytes
from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.checkpoint.formats.planning import Fetch
from automodel_ckpt.checkpoint.jobs import Data, Job, Span
from automodel_ckpt.checkpoint.manifest import Part
from automodel_ckpt.checkpoint.writer import Export, Write, Writer
from automodel_ckpt.errors import AutomodelError

PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_ROOM_BYTES = 64 << 20

State = Literal["idle", "busy", "failed"]
"""Of an upload; a failed one may still be under way."""


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
            raise OSError(12, f"a copy of this rank's state takes {wanted} bytes, {free} are available")
        self._release()
        os.ftruncate(self.descriptor, wanted)
        self._view = memoryview(_faulted_in(mmap.mmap(self.descriptor, wanted)))
        self.tensor = torch.frombuffer(self._view, dtype=torch.uint8)
        if self._pinned:
            torch.cuda.check_error(int(_cudart().cudaHostRegister(self.tensor.data_ptr(), wanted, 0)))

    def filled(self, place: _Place) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Put a piece's bytes in their place; those of a tensor are left to the caller: (target, source)."""
        if isinstance(place.source, torch.Tensor):
            return (self.tensor[place.at : place.at + place.nbytes], place.source) if place.nbytes else None
        self._view[place.at : place.at + place.nbytes] = place.source
        return None

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
        mapped[::PAGE_BYTES] = bytes(-(-len(mapped) // PAGE_BYTES))
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


class Background:
    """This rank's writer process, the memory it writes from, and the one upload that may be under way."""

    def __init__(self, *, on_cuda: bool = False) -> None:
        """Raises :class:`OSError` where this machine cannot do it."""
        self._memory = HostMemory(pinned=on_cuda)
        self._writer = Writer(self._memory.descriptor)
        self._stream = torch.cuda.Stream() if on_cuda else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: AutomodelError | None = None
        self._cancelled = threading.Event()

    @property
    def writer_pid(self) -> int:
        return self._writer.pid

    @property
    def state(self) -> State:
        if self._failure is not None:
            return "failed"
        return "busy" if self._thread is not None and self._thread.is_alive() else "idle"

    def reserve(self, nbytes: int) -> None:
        """Allocate before the first save what it will need. Raises :class:`OSError`."""
        self._memory.reserve(nbytes)

    # ---------------------------------------------------------------- copy

    def stage(self, jobs: Sequence[Job], *, at_once: Collection[int] = ()) -> list[Job]:
        """The same jobs over a copy of their bytes. Raises :class:`OSError` where memory does not suffice.

        On CUDA the copies are only under way when this returns: what they are of may change after :meth:`await_copies`.
        Tensors whose data pointer is among *at_once* may change before.
        """
        placed, nbytes = _lay_out(jobs)
        self._memory.reserve(nbytes)
        distinct = {place.at: place for places in placed for place in places}
        pairs = [pair for place in distinct.values() if (pair := self._memory.filled(place))]
        if self._stream is None:
            _copy(pairs)
        else:
            self._copy_from_device(pairs, at_once)
        return [job.over([place.span for place in places]) for job, places in zip(jobs, placed, strict=True)]

    def _copy_from_device(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], at_once: Collection[int]) -> None:
        """Beside the next forward and backward, but for tensors that those change."""
        assert self._stream is not None
        _copy([pair for pair in pairs if not pair[1].is_cuda or pair[1].data_ptr() in at_once])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            later = [pair for pair in pairs if pair[1].is_cuda and pair[1].data_ptr() not in at_once]
            _copy(later)
            for _, source in later:
                source.record_stream(self._stream)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)

    def await_copies(self) -> None:
        """What the device is given from now on does not change state before its copy is taken."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    # ---------------------------------------------------------------- upload

    def start(
        self, staging: Path, part: Part, jobs: Sequence[Job], *, then: Callable[[], None] | None, doing: str
    ) -> None:
        """Write in the background, and *then* do that, in a thread. The upload before has to have ended.

        *doing* is for messages. Raises :class:`OSError` where a writer that ended before cannot be started anew.
        """
        if not self._writer.alive:
            self._writer.end()
            self._writer = Writer(self._memory.descriptor)
        command = Write(str(staging), part, jobs, self._memory.tensor.nbytes)
        self._cancelled.clear()
        self._thread = threading.Thread(target=self._upload, args=(command, then, doing), name="upload", daemon=True)
        self._thread.start()

    def _upload(self, command: Write, then: Callable[[], None] | None, doing: str) -> None:
        try:
            if self._copied is not None:
                self._copied.synchronize()
            self._writer.do(command)
            if then is not None:
                then()
        except Exception as error:
            if not self._cancelled.is_set():
                self._failure = as_failure(error, doing, Path(command.staging))

    def export(self, sources: Sequence[Path]) -> tuple[str, list[str]]:
        """In the course of an upload: see :class:`~automodel_ckpt.checkpoint.writer.Export`."""
        answer: tuple[str, list[str]] = self._writer.do(Export([str(source) for source in sources]))
        return answer

    def pause(self, seconds: float) -> None:
        """In the course of an upload: wait. Raises :class:`Cancelled` when there is nothing to wait for any more."""
        if self._cancelled.wait(seconds):
            raise Cancelled

    def wait(self, seconds: float | None = None) -> None:
        """Return when the upload has ended, or after so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def abandon(self) -> AutomodelError | None:
        """End the upload as it is, and have everything ready for the next. Returns what had failed, if it had."""
        self._cancelled.set()
        if self.state == "busy":
            self._writer.kill()
        self.wait()
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait for the upload, and give everything back."""
        self.wait()
        self._writer.end()
        self._memory.close()


class Cancelled(Exception):
    """The upload is not wanted any more."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes, and where in the memory they are copied to."""

    source: torch.Tensor | bytes | memoryview
    at: int

    @property
    def nbytes(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.nbytes

    @property
    def span(self) -> Span:
        return Span(self.at, self.nbytes)


def _lay_out(jobs: Sequence[Job]) -> tuple[list[list[_Place]], int]:
    """Places for all bytes, and how many they take. What follows on each other in a file does in memory, and stands at
    the same place of a page, so that it can go to disk from there. Data that go to several places are copied once."""
    placed, end = [], 0
    known: dict[int, _Place] = {}
    for job in jobs:
        places: list[_Place] = []
        follows = -1
        for start, data in job.data():
            place = known.get(id(data)) if isinstance(data, Fetch) else None
            if place is None:
                if start != follows:
                    end = -(-end // PAGE_BYTES) * PAGE_BYTES + start % PAGE_BYTES
                place = known[id(data)] = _Place(_source(data), end)
                end, follows = end + place.nbytes, start + place.nbytes
            places.append(place)
        placed.append(places)
    return placed, end


def _source(data: Data) -> torch.Tensor | bytes | memoryview:
    if isinstance(data, Fetch):
        return flat_bytes(data.tensor())
    if isinstance(data, Span):
        raise ValueError("the data are a copy already")
    return data if isinstance(data, bytes) else data()


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)
