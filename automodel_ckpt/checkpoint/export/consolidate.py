"""Consolidation: convert the shards of a checkpoint to the files that Hugging Face's loaders read.

    report = consolidate("checkpoints/epoch_0_step_20")        # or its model/
    report.output                                              # .../model/consolidated

The steps are: open the source, verify everything but the tensors, plan (without side effects), write all files to a
staging directory next to the target and verify the tensors meanwhile, flush the files to disk, rename the directory. An
earlier export is unchanged until the last step. Imports no torch, and numpy only for casts and interleaved slices.

:func:`write_weights` reads slices, compares them with their digests, assembles, casts, digests and writes. Threads take
whole tensors. A tensor is written from front to back, one box after the other. Both a tensor and its slices store their
elements in row-major order, and a box is a contiguous range of the tensor. Therefore the elements of a slice in a box
follow those in the box before, and each slice is read once, from front to back, however the tensor was sharded. Memory
is limited to buffers of some megabytes per thread. A file is read from the page cache as far as it is there, and the
rest with O_DIRECT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.files import (
    Check,
    Digested,
    Log,
    cast_lines,
    check_target,
    resolved_target,
    side_files,
    staged,
    write_manifest,
    write_side_files,
)
from automodel_ckpt.checkpoint.export.plan import (
    ExportTensor,
    OutputFile,
    make_plan,
    parse_cast_dtype,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.durable_file import (
    DIRECT_FROM_BYTES,
    SECTOR_BYTES,
    begins_at_a_sector,
    block_of,
    bypass_page_cache,
    digest_from,
    digest_of,
    reserve_range,
)
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    boxes,
    contiguous_slices,
    flat_index,
    intersection,
    is_one_run,
)
from automodel_ckpt.checkpoint.parts.verify import files_covered_by_slices, verify
from automodel_ckpt.checkpoint.sources.source import Source, maps_of, open_checkpoint
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, Problem, RecipeError, unusable

__all__ = ["ConsolidationReport", "consolidate"]

log_default = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True)
class ConsolidationReport:
    """An export that was published: its directory *output*, and the number of files, tensors and bytes of the weights.

    *casts* has the number of tensors that were cast, by (from, to) dtype code. *checked* is whether the source has
    digests, which were compared.
    """

    output: Path
    num_files: int
    num_tensors: int
    nbytes: int
    seconds: float
    checked: bool = True
    casts: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def consolidate(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    cast_dtype: str | None = None,
    num_threads: int = 5,
    num_procs: int = 1,
    keep_dtypes: bool = False,
    log: Log = log_default.info,
    before_publishing: Check = lambda: None,
    opener: Callable[[Path], Source] = open_checkpoint,
) -> ConsolidationReport:
    """Export the model in *source*, a checkpoint or its ``model/``, as Hugging Face files.

    With the *opener* ``open_source`` of ``convert/open.py``, *source* can also be a directory of another program.
    *output* defaults to ``consolidated`` in the model's directory (a model that is Hugging Face files already is only
    checked then); *cast_dtype* is one of bf16, fp16, fp32, fp64 or a long name. Without it, tensors have the dtypes of
    the base, or with *keep_dtypes* of the checkpoint. There are *num_threads* times *num_procs* threads. *log*
    gets a line for each warning and each kind of cast; an exception that *before_publishing* raises ends the export.

    Raises :class:`CheckpointUnusable` for a source that is damaged, incomplete or does not match its base,
    :class:`SaveFailed` if the output cannot be written, and :class:`RecipeError` for a wrong argument. In each case
    nothing was written, and an earlier export is unchanged.
    """
    started = time.monotonic()
    threads = _num_threads(num_procs, num_threads)
    cast_code = parse_cast_dtype(cast_dtype)
    opened = opener(Path(source))
    _check_needs_consolidation(opened)
    if opened.finished and output is None and cast_code is None:
        CheckpointUnusable.check(_problems(opened, threads, "digest"))
        log(
            f"nothing to do: the files in {opened.model_directory} are already in Hugging Face format"
        )
        tensors = opened.tensors.values()
        num_files = len({tensor.slices[0].file for tensor in tensors})
        nbytes = sum(tensor.nbytes for tensor in tensors)
        seconds = time.monotonic() - started
        return ConsolidationReport(opened.model_directory, num_files, len(tensors), nbytes, seconds)
    target = resolved_target(output, opened.model_directory / layout.CONSOLIDATED)
    check_target(target)
    _check_source(opened, threads)
    maps = maps_of(opened)
    plan = make_plan(
        opened.tensors,
        opened.tied,
        dataclasses.replace(maps, dtype=None) if keep_dtypes else maps,
        cast_dtype=cast_code,
        where=str(opened.model_directory),
    )
    beside, its_warnings = side_files(opened, plan, maps)
    warnings = (*opened.warnings, *plan.warnings, *its_warnings)
    for text in [*(f"warning: {text}" for text in warnings), *cast_lines(plan.casts)]:
        log(text)
    with staged(target, log, before_publishing=before_publishing) as staging:
        try:
            parts = write_weights(opened.root, staging, plan.files, threads)
        except DamagedSlice as damaged:
            raise _damaged(opened, damaged.stored, threads) from None
        write_side_files(beside, staging)
        write_manifest(plan, opened, staging, parts)
    return ConsolidationReport(
        target,
        len(plan.files),
        len(plan.tensors),
        plan.nbytes,
        time.monotonic() - started,
        opened.manifest is not None,
        plan.casts,
        warnings,
    )


_MAX_WORKERS = 1024


def _num_threads(num_procs: int, num_threads: int) -> int:
    for name, value in (
        ("--nproc (NPROC_PER_NODE)", num_procs),
        ("--num-threads (NUM_THREADS)", num_threads),
    ):
        if not 1 <= value <= _MAX_WORKERS:
            raise RecipeError(
                f"not a number of workers from 1 to {_MAX_WORKERS}",
                where=name,
                value=value,
                hint="",
            )
    return num_procs * num_threads


def adapter_of_another_program(directory: Path) -> CheckpointUnusable:
    """Return the error of an export of the adapter in *directory*, which another program saved."""
    return unusable(
        "this is an adapter, not a complete model",
        directory,
        layout.ADAPTER_MODEL,
        "peft loads this directory as it is; to merge it with its base, import it with `ckpt import DIR RUN`, "
        "then `ckpt export RUN --merge`",
    )


def _check_needs_consolidation(source: Source) -> None:
    if layout.ADAPTER_MODEL in source.files:
        raise adapter_of_another_program(source.model_directory)
    if source.finished and source.manifest is None:
        raise unusable(
            "these are complete Hugging Face files, not shards: they need no consolidation",
            source.model_directory,
            counted(len(source.files), "file"),
            "use the directory as it is",
        )


def _check_source(source: Source, num_threads: int) -> None:
    """Verify the files of *source*, except for the bytes of slices, which are verified while they are copied.

    Raises :class:`CheckpointUnusable` with all problems.
    """
    if source.manifest is None:
        return
    CheckpointUnusable.check(_problems(source, num_threads, "size"))
    # Slices are verified during the copy, except the slices of whole files, which come from headers without digests.
    # After damage here, all files are compared, to report all damage.
    copied = set() if source.finished else files_covered_by_slices(source.root, source.manifest)
    if _problems(source, num_threads, "digest", copied):
        CheckpointUnusable.check(_problems(source, num_threads, "digest"))


def _problems(
    source: Source, num_threads: int, level: Level, without: Set[str] = frozenset()
) -> list[Problem]:
    assert source.manifest is not None
    files = {path: record for path, record in source.manifest.files.items() if path not in without}
    manifest = dataclasses.replace(source.manifest, files=files)
    return verify(source.root, manifest, level, num_threads=num_threads)


def _damaged(source: Source, damaged: Slice, num_threads: int) -> AutomodelError:
    """Return the error that stopped the copy, with all other damage in the source."""
    if problems := _problems(source, num_threads, "digest"):
        return CheckpointUnusable.all_of(problems)
    return unusable(
        "a slice changed while it was read",
        source.root / damaged.file,
        f"tensor {damaged.fqn} (slice at {list(damaged.offsets)})",
        "check for another program that writes there or for faulty memory, then export again",
    )


# ---------------------------------------------------------------- copying slices


_MAX_OPEN = 64
_CACHEFUL_BYTES = 256 << 10
"""What is copied from the page cache in one call: it fits into the processor's cache."""
# For fewer bytes, the question whether they are cached costs more than the answer saves.
_ASK_FROM_BYTES = 64 << 10
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class Inputs:
    """The files below *root* that one thread reads, opened when they are needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[str, _Input] = {}

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read(self, file: str, start: int, memory: memoryview) -> None:
        """Fill *memory* with the bytes from *start*. Raises :class:`CheckpointUnusable` if the file ends before."""
        source = self._input(file)
        done = 0
        while done < len(memory):
            try:
                count, why = source.read(start + done, memory[done:]), "the file ends here"
            except OSError as error:
                count, why = 0, str(error.strerror)
            if count == 0:
                raise unusable(
                    "a slice cannot be read", self._root / file, f"at byte {start + done}: {why}"
                )
            done += count

    def _input(self, file: str) -> _Input:
        if file not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self.close()
            # Opened twice: a duplicated descriptor would share the flag O_DIRECT.
            self._open[file] = _Input(open_safely(self._root, file), open_safely(self._root, file))
        return self._open[file]


class _Input:
    """One file: a descriptor that reads through the page cache, and one with O_DIRECT, if the file system has it."""

    def __init__(self, cached: int, direct: int) -> None:
        self._cached, self._direct = cached, direct
        self._is_direct = bypass_page_cache(direct, True)
        os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        os.close(self._cached)
        os.close(self._direct)

    def read(self, start: int, memory: memoryview) -> int:
        """Read some bytes into *memory*. Returns their number: 0 only at the end of the file."""
        if self._is_direct and len(memory) >= _ASK_FROM_BYTES:
            try:
                if count := self._read_directly(start, memory):
                    return count
            except OSError as error:
                # Some file systems accept the flags and reject the read.
                if error.errno not in _UNSUPPORTED:
                    raise
                self._is_direct = False
        # One large request for the disk, which is then copied in parts.
        os.posix_fadvise(self._cached, start, len(memory), os.POSIX_FADV_WILLNEED)
        return os.preadv(self._cached, [memory[:_CACHEFUL_BYTES]], start)

    def _read_directly(self, start: int, memory: memoryview) -> int:
        """Read what is in the page cache, or if nothing is, whole sectors past it. Returns 0 where neither works."""
        with contextlib.suppress(BlockingIOError):
            # Linux 5.9 and 5.10 can return 0 for bytes that are not in the page cache.
            part = [memory[:_CACHEFUL_BYTES]]
            if count := os.preadv(self._cached, part, start, os.RWF_NOWAIT):
                return count
        if start % SECTOR_BYTES or not begins_at_a_sector(memory):
            return 0
        whole = len(memory) // SECTOR_BYTES * SECTOR_BYTES
        return os.preadv(self._direct, [memory[:whole]], start)


class Output:
    """A new file of *nbytes* that begins with *header*, open for writing from several threads.

    The file's space is reserved, so that a full disk is detected before the copy. Data must have the same offset within
    a sector in memory as in the file, which O_DIRECT requires. Through the page cache, one thread writes at a time:
    more would only wait for the file's lock in the kernel. Raises OSError with the file's name.
    """

    def __init__(self, path: Path, header: bytes, nbytes: int) -> None:
        self._path = path
        self._one_writer = threading.Lock()
        self._cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct = -1
        try:
            with naming(path):
                os.ftruncate(self._cached, nbytes)
                reserve_range(self._cached, 0, nbytes)
                write_all(self._cached, memoryview(header), 0)
                if nbytes >= DIRECT_FROM_BYTES:
                    self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._cached)
            raise
        self._is_direct = self._direct >= 0 and bypass_page_cache(self._direct, True)

    def sync(self) -> None:
        """Make the file durable.

        Through the descriptor that is open since before the first write: it reports a failed write-back in any case.
        """
        with naming(self._path):
            os.fsync(self._cached)

    def close(self) -> None:
        """Close the file. The data is durable only after :meth:`sync`."""
        os.close(self._cached)
        if self._direct >= 0:
            os.close(self._direct)

    def write(self, data: memoryview, at: int) -> None:
        """Write all of *data* at byte *at*. Raises OSError with the file's name."""
        with naming(self._path):
            # The ends share a sector with other data and use the page cache.
            done = min(-at % SECTOR_BYTES, len(data))
            last = len(data) - (at + len(data)) % SECTOR_BYTES
            self._put_cached(data[:done], at)
            # A short write can end within a sector: the rest then goes through the page cache.
            while self._is_direct and done < last and (at + done) % SECTOR_BYTES == 0:
                try:
                    done += os.pwrite(self._direct, data[done:last], at + done)
                except OSError as error:
                    # Some file systems accept the flag and reject the write.
                    if error.errno != errno.EINVAL:
                        raise
                    break
            self._put_cached(data[done:], at + done)

    def _put_cached(self, data: memoryview, at: int) -> None:
        if data:
            with self._one_writer:
                write_all(self._cached, data, at)


BLOCK_BYTES = 2 << 20
# A block can be read from up to four times its bytes: F64 cast to BF16.
_SCRATCH_BYTES = 4 * BLOCK_BYTES


class DamagedSlice(Exception):
    """The bytes of the slice *stored* do not have its digest: the output must not be used."""

    def __init__(self, stored: Slice) -> None:
        super().__init__(stored.fqn)
        self.stored = stored


def write_weights(
    root: Path, staging: Path, files: Sequence[OutputFile], num_threads: int
) -> list[Digested]:
    """Write *files* to *staging*, durably, from the slices under *root*. Returns the digests of all byte ranges.

    Raises :class:`DamagedSlice` for a slice with another digest, OSError with the file's name, and
    :class:`CheckpointUnusable` for a source that is too short.
    """
    digests = []
    tasks = []
    outputs: dict[str, Output] = {}
    stopped = threading.Event()

    def work(tensor: ExportTensor, start: int, file: str) -> list[Digested]:
        copier = copiers.pop()
        try:
            found = copier.copy(tensor, start, outputs[file])
            return [Digested(file, *each) for each in found]
        except BaseException:
            stopped.set()
            raise
        finally:
            copiers.append(copier)

    with contextlib.ExitStack() as stack:
        for file in files:
            outputs[file.name] = Output(staging / file.name, file.header, file.nbytes)
            stack.callback(outputs[file.name].close)
            digests.append(Digested(file.name, 0, len(file.header), digest_of(file.header)))
            tasks += [
                (tensor, start, file.name) for tensor, start in file.placed() if tensor.nbytes
            ]
        # The largest first, so that all threads end at about the same time.
        tasks.sort(key=lambda task: -task[0].nbytes)
        total = sum(tensor.nbytes for tensor, _, _ in tasks)
        count = max(1, min(num_threads, total // BLOCK_BYTES))
        copiers = [
            _Copier(root, stack.enter_context(contextlib.closing(Inputs(root))), stopped)
            for _ in range(count)
        ]
        pool = (started_pool(count, "consolidate") if count > 1 else None) or CallingThread()
        # Before the files are closed.
        stack.callback(pool.end, stopped.set)
        try:
            for result in [pool.submit(work, *task) for task in tasks]:
                digests += result.result()
        except BaseException:
            # Also an interruption: the threads must end before it is raised.
            stopped.set()
            raise
        for output in outputs.values():
            output.sync()
    return digests


@dataclass(slots=True)
class _Part:
    """A slice of a tensor, which begins at element number *first* of it, and what was read of it so far."""

    stored: Slice
    first: int
    hashed: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    num_read: int = 0


class _Copier:
    """The buffers of a thread, with which it copies one tensor after another."""

    def __init__(self, root: Path, inputs: Inputs, stopped: threading.Event) -> None:
        self._root, self._inputs, self._stopped = root, inputs, stopped
        self._block = block_of(BLOCK_BYTES + SECTOR_BYTES)
        self._scratch = block_of(_SCRATCH_BYTES)

    def copy(self, tensor: ExportTensor, start: int, output: Output) -> list[tuple[int, int, str]]:
        """Write a tensor from byte *start* on. Returns its byte ranges: start, number of bytes, digest.

        Returns nothing when another thread has failed.
        """
        shape = tensor.stored.shape
        itemsize = DTYPE_BITS[tensor.dtype] // 8
        parts = [
            _Part(stored, flat_index(stored.offsets, shape))
            for stored in contiguous_slices(tensor.stored)
            if stored.nbytes
        ]
        parts.sort(key=lambda part: part.first)
        # Then the output consists of the bytes of the slices, which need no second digest.
        as_is = tensor.dtype == tensor.stored.dtype and all(
            is_one_run(part.stored.box, shape) for part in parts
        )
        digests = []
        hashed = xxhash.xxh3_128()
        first = 0
        for box in boxes(shape, BLOCK_BYTES // itemsize):
            if self._stopped.is_set():
                return []
            at = start + first * itemsize
            # O_DIRECT: the bytes have the same offset within a sector in memory as in the file.
            skip = at % SECTOR_BYTES
            out = self._block[skip : skip + box.numel * itemsize]
            for part in list(parts):
                if part.first >= first + box.numel:
                    break
                common = intersection(part.stored.box, box)
                if common is None:
                    continue
                if as_is:
                    begin = (flat_index(common.offsets, shape) - first) * itemsize
                    self._read(part, out[begin : begin + common.numel * itemsize])
                else:
                    self._place(part, common, box, tensor, out)
                if part.num_read == part.stored.nbytes:
                    parts.remove(part)
                    digest = digest_from(part.hashed)
                    if part.stored.digest not in (None, digest):
                        raise DamagedSlice(part.stored)
                    digests.append((start + part.first * itemsize, part.stored.nbytes, digest))
            if not as_is:
                hashed.update(out)
            output.write(out, at)
            first += box.numel
        return digests if as_is else [(start, tensor.nbytes, digest_from(hashed))]

    def _read(self, part: _Part, memory: memoryview) -> None:
        """Fill *memory* with the next bytes of a slice."""
        stored = part.stored
        if stored.strides is None:
            self._inputs.read(stored.file, stored.start + part.num_read, memory)
        else:
            from automodel_ckpt.checkpoint.tensors.box_reader import read_row_major

            first = part.num_read * 8 // DTYPE_BITS[stored.dtype]
            read_row_major(self._root, stored, first, memory)
        part.hashed.update(memory)
        part.num_read += len(memory)

    def _place(
        self, part: _Part, common: Box, box: Box, tensor: ExportTensor, out: memoryview
    ) -> None:
        """Read the elements *common* of a slice, and put them, cast, into *out*, the elements of *box*."""
        import numpy as np

        from automodel_ckpt.checkpoint.tensors.float_cast import cast_into, storage_dtype

        source, target = tensor.stored.dtype, tensor.dtype
        data = self._scratch[: common.numel * DTYPE_BITS[source] // 8]
        self._read(part, data)
        values = np.frombuffer(data, storage_dtype(source, DTYPE_BITS[source]))
        result = np.frombuffer(out, storage_dtype(target, DTYPE_BITS[target])).reshape(box.sizes)
        # The ellipsis makes the result a view even without dimensions.
        position: tuple[Any, ...] = (*common.within(box), ...)
        cast_into(values.reshape(common.sizes), source, target, result[position])
