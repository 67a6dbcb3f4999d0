"""Asynchronous checkpointing on one rank: copy its state into dedicated host memory and write it in another process.

At most one save is written at a time. No collective is called here; ``saving/async_saves.py`` coordinates the ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest
from automodel_ckpt.checkpoint.jobs.reuse import Previous
from automodel_ckpt.checkpoint.jobs.writer import Command, Export, Write, Writer
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.saving.host_memory import HostMemory, MemoryLayout
from automodel_ckpt.errors import AutomodelError, ExportFailed, SaveFailed

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
            hint="check for a disk that does not respond or a stopped process",
            restart="run the same command",
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
