"""A file that several ranks write, each its slices at their offsets.

The first rank that opens the file creates it; rank 0 reserves its space and writes its header. A rank writes only the
bytes of its slices, so that the order of the ranks does not matter. Imports no torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import xxhash

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.files.digests import digest_from
from automodel_ckpt.checkpoint.files.direct import (
    BLOCK_BYTES,
    DIRECT_FROM_BYTES,
    METER,
    DirectStream,
)
from automodel_ckpt.checkpoint.files.durable_file import reserve_range
from automodel_ckpt.checkpoint.parts.slices import Run, Tensor, runs_in_file

# Shorter runs that do not continue the stream are written without it: each would cost a switch of threads.
_STREAM_FROM_BYTES = 64 << 10


class SharedFile:
    """A file that several ranks write, open for writing at given offsets; fsynced when the block succeeds.

    *nbytes* is approximately what this rank writes. From 8 MiB on, long byte ranges bypass the page cache where the
    file system supports it. Raises :class:`OSError` naming the file.
    """

    def __init__(self, path: Path, *, nbytes: int) -> None:
        self.path = path
        # Not O_EXCL: any rank may be the first.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        if os.fstat(self._descriptor).st_nlink > 1:
            os.close(self._descriptor)
            # Incremental saves share files with published checkpoints, which never change.
            raise OSError(errno.EPERM, "a file with several names must not be changed", str(path))
        self._stream: DirectStream | None = None
        if nbytes >= DIRECT_FROM_BYTES:
            self._stream = DirectStream(self._descriptor, path)

    def create(self, header: bytes | memoryview, nbytes: int) -> None:
        """Reserve *nbytes* for the whole file, so that a full disk is found now, and write its header."""
        with naming(self.path):
            if not reserve_range(self._descriptor, 0, nbytes):
                self._extend(nbytes)
            write_all(self._descriptor, memoryview(header), 0)

    def _extend(self, nbytes: int) -> None:
        # Never shortens the file: nbytes is the size of the whole file, so no rank's bytes are lost.
        if os.fstat(self._descriptor).st_size < nbytes:
            os.ftruncate(self._descriptor, nbytes)

    def write_slice(self, entry: Tensor, data: bytes | memoryview) -> str:
        """Write the one slice of *entry*, with the row-major bytes *data*, at its position; return their digest."""
        hashed = xxhash.xxh3_128()
        (stored,) = entry.slices
        view = memoryview(data).cast("B")
        with naming(self.path):
            for group in _groups(runs_in_file(stored, entry.shape)):
                first = group[0].target
                block = view[first : group[-1].target + group[-1].nbytes]
                hashed.update(block)
                METER.nbytes += len(block)
                for run in group:
                    offset = run.target - first
                    self._write(block[offset : offset + run.nbytes], run.source)
        return digest_from(hashed)

    def _write(self, data: memoryview, start: int) -> None:
        stream = self._stream
        if stream is not None and (len(data) >= _STREAM_FROM_BYTES or stream.end == start):
            stream.write(data, start)
        else:
            write_all(self._descriptor, data, start)

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with naming(self.path):
            try:
                if self._stream is not None:
                    self._stream.close(finish=kind is None)
                if kind is None:
                    # On every rank: what it wrote is in the page cache of its node.
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _groups(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Group consecutive runs into about BLOCK_BYTES bytes each; longer runs are split."""
    group = []
    nbytes = 0
    for run in runs:
        for offset in range(0, run.nbytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, run.nbytes - offset)
            group.append(Run(run.source + offset, run.target + offset, length))
            nbytes += length
            if nbytes >= BLOCK_BYTES:
                yield group
                group, nbytes = [], 0
    if group:
        yield group
