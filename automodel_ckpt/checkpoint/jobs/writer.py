"""The process that writes a rank's asynchronous saves. It imports no torch and does not communicate with other ranks.

The trainer starts it once and sends it commands; the bytes to write are in shared memory. It exits immediately when the
trainer has ended: the next start removes an unpublished checkpoint.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.python_child import CommandProcess, run_commands
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import METER
from automodel_ckpt.checkpoint.files.threads import collector_paused
from automodel_ckpt.checkpoint.jobs.jobs import (
    RankManifest,
    finalize,
    read_rank_manifests,
    run_all,
)
from automodel_ckpt.checkpoint.jobs.reuse import Previous
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import RESUME
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run.lease import check_token
from automodel_ckpt.errors import SaveFailed


@dataclass(frozen=True, slots=True)
class Write:
    """Run the pickled *jobs* below *staging* on the first *memory_bytes* of shared memory; write the rank manifest.

    Unchanged files are shared with the checkpoint *previous*.
    """

    staging: str
    written: RankManifest
    jobs: Sequence[bytes]
    memory_bytes: int
    previous: Previous | None = None

    @collector_paused()
    def run(self, memory: SharedMemory) -> None:
        staging = Path(self.staging)
        view = memory.view(self.memory_bytes)
        for jobs in self.jobs:
            run_all(pickle.loads(jobs), staging, self.written, view, self.previous)
        # The last action: as soon as the file appears, rank 0 may publish and remove its directory.
        commit.write_by_rename(
            staging / layout.rank_manifest_file(self.written.rank), self.written.to_bytes()
        )


@dataclass(frozen=True, slots=True)
class Export:
    """Export these model directories of a checkpoint as Hugging Face files. Returns (last output directory, log lines).

    *lease* is the run directory's lock file and the run's token in it: an export is published only while it is there.
    """

    sources: Sequence[str]
    lease: tuple[Path, str] | None = None

    def run(self, memory: SharedMemory) -> tuple[str, list[str]]:
        from automodel_ckpt.checkpoint.export.consolidate import consolidate

        log_lines: list[str] = []
        output = ""
        for source in self.sources:
            done = consolidate(
                Path(source), log=log_lines.append, before_publishing=self._check_lease
            )
            output = str(done.output)
        return output, log_lines

    def _check_lease(self) -> None:
        """Raise :class:`LeaseLost` where another run took over the run directory."""
        if self.lease is not None:
            check_token(*self.lease)


@dataclass(frozen=True, slots=True)
class Finalize:
    """Finalize *staging*, which has all rank manifests. Returns the bytes of all files.

    *common* has the files that rank 0 wrote in addition to its rank manifest.
    """

    staging: str
    partial_manifest: Manifest
    common: RankManifest

    @collector_paused()
    def run(self, memory: SharedMemory) -> int:
        staging = Path(self.staging)
        rank_manifests = read_rank_manifests(staging, self.partial_manifest.world_size)
        rank_manifests[self.common.rank].files.update(self.common.files)
        return finalize(staging, self.partial_manifest, rank_manifests)


Command = Write | Finalize | Export


class Writer(CommandProcess):
    """The trainer's handle of a writer process that shares the memory behind a file descriptor."""

    def __init__(self, memory: int) -> None:
        """Start the process. Raises OSError."""
        super().__init__(__name__, str(memory), pass_fds=(memory,))

    def activity(self) -> tuple[bytes, ...]:
        """Counters that change when the process has computed, read or written anything; empty after its end."""
        process = Path(f"/proc/{self.pid}")
        try:
            # Fields 14 and 15 of proc_pid_stat(5): user and system time. The name in parentheses may contain spaces.
            _, _, fields = (process / "stat").read_bytes().rpartition(b")")
        except OSError:  # the process has ended
            return ()
        counters = [*fields.split()[11:13], b"%d" % self.progress]
        # Hardened systems restrict this file to debuggers (ptrace_scope, hidepid). The other counters remain.
        with contextlib.suppress(OSError):
            counters.append((process / "io").read_bytes())
        return tuple(counters)

    def run(self, command: Command) -> Any:
        """Run a command and return its result. Raises its exception, or :class:`SaveFailed` where the process died."""
        try:
            return self.do(command)
        except ChildProcessError as error:
            raise SaveFailed(
                "the process that writes this rank's checkpoints ended unexpectedly",
                where=command.sources[0] if isinstance(command, Export) else command.staging,
                value=str(error),
                hint="check what killed it (the system log reports out-of-memory kills)",
                restart=RESUME,
            ) from error


class SharedMemory:
    """The writer process's mapping of the memory; mapped again after it has grown."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def view(self, nbytes: int) -> memoryview:
        if nbytes == 0:
            return memoryview(b"")
        size = os.fstat(self._descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self._descriptor, size)
        return memoryview(self._map)[:nbytes]


def main(arguments: list[str]) -> None:
    """Run commands. *arguments*: as for :func:`~.python_child.run_commands`, then the descriptor of the memory."""
    descriptor, trainer, memory = arguments
    shared = SharedMemory(int(memory))
    bytes_before = 0

    def run(command: Command) -> Any:
        nonlocal bytes_before
        bytes_before = METER.nbytes
        return command.run(shared)

    run_commands(descriptor, trainer, run, lambda: METER.nbytes - bytes_before)
