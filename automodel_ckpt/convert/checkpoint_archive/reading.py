"""``ckpt unarchive``: restore the checkpoints of an archive. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from automodel_ckpt.base.durable_io import fsync_file
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.export.export_leftovers import Log
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import FileRecord
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.files.safe_open import open_regular, open_safely
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import SAME_COMMAND, as_failure
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.manifest_file import MAX_BYTES
from automodel_ckpt.checkpoint.parts.merkle import has_merkle_digest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import maintenance
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.lease import COMMAND_HINT
from automodel_ckpt.checkpoint.run.policy import KeepPolicy
from automodel_ckpt.checkpoint.run.writable import check_not_a_file
from automodel_ckpt.convert.checkpoint_archive.byte_planes import (
    BLOCK_BYTES,
    Base,
    Segment,
    segments_of,
    transformed,
)
from automodel_ckpt.convert.checkpoint_archive.format import (
    INDEX,
    LOG_DIRECTORY,
    LOGS,
    MAX_INDEX_BYTES,
    MAX_LOG_BYTES,
    MAX_WINDOW_BYTES,
    Entry,
    base_of,
    is_unchanged,
    parse_index,
    zstandard_library,
)
from automodel_ckpt.convert.formats.nemo.tar_reading import TarFault, TarMember, TarReader
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed, os_problem


def extract(path: Path, run: Path, *, log: Log) -> list[Path]:
    """Extract all checkpoints of the archive *path* into the run directory *run*; return their paths.

    Checkpoints that exist already with the same manifest are skipped. Raises :class:`CheckpointUnusable` for a damaged
    or hostile archive, a base that is missing, and a name that another checkpoint has; :class:`SaveFailed` if a
    checkpoint cannot be written. What was published before stays; nothing else remains.
    """
    _check_readable(path)
    directory = RunDirectory(run, KeepPolicy(), "val_loss")
    check_not_a_file(run)
    try:
        # The lease first: recover() removes staging directories, which a live run may be writing.
        directory.hold(COMMAND_HINT)
        maintenance.recover(directory.root)
        reader = ZstdTarReader(path)
        with reader:
            published = _Extraction(reader, directory.root, log).run()
        # Sets LATEST and LOWEST_VAL to the newest and the best checkpoint.
        directory.candidates(None)
        return published
    except OSError as error:
        raise as_failure(error, f"extracting {path}", run, restart=SAME_COMMAND) from error
    finally:
        directory.release()


def _check_readable(path: Path) -> None:
    """Raise :class:`CheckpointUnusable` if *path* is no file that can be opened, before a run directory is created."""
    try:
        os.close(open_regular(Path(os.path.realpath(path))))
    except OSError as error:
        hint = "check the path and its permissions"
        problem = os_problem(error, "the archive cannot be read", hint=hint)
        raise CheckpointUnusable.all_of([problem]) from error


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


class ZstdTarReader(TarReader):
    """A tar archive of checkpoints that is compressed with zstd.

    It has no limit on members or bytes: the caller accepts only the members that the manifests list, with their sizes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, max_members=sys.maxsize)
        zstandard = zstandard_library()
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        stream = decompressor.stream_reader(self._raw, read_across_frames=True, closefd=False)
        self._file = cast(BinaryIO, _Decompressed(stream, zstandard.ZstdError))
        self.is_compressed = True
        self._max_bytes = sys.maxsize

    def content(self, member: TarMember) -> BinaryIO:
        """Return the content of the member that was just yielded as a file that is read once."""
        return cast(BinaryIO, _Content(self.blocks(member, BLOCK_BYTES)))


class _Decompressed:
    """A decompressed stream whose read() returns all bytes that are asked for, and raises :class:`TarFault`."""

    def __init__(self, stream: Any, fault: type[Exception]) -> None:
        self._stream = stream
        self._fault = fault

    def read(self, size: int = -1) -> bytes:
        parts: list[bytes] = []
        missing = size
        try:
            while missing > 0 and (data := self._stream.read(missing)):
                parts.append(data)
                missing -= len(data)
        except self._fault as error:
            raise TarFault(f"its compressed data are damaged: {error}") from error
        return b"".join(parts)

    def close(self) -> None:
        """Close the stream, but not the file that it reads."""
        self._stream.close()


class _Content:
    """The content of a member, from its blocks, in reads of any size."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing > 0:
            if not self._rest:
                self._rest = memoryview(next(self._blocks, b""))
                if not self._rest:
                    break
            parts.append(bytes(self._rest[:missing]))
            missing -= len(parts[-1])
            self._rest = self._rest[len(parts[-1]) :]
        return b"".join(parts)


class _Extraction:
    """Extracts the members of an archive in their order into the run directory *root*."""

    def __init__(self, reader: ZstdTarReader, root: Path, log: Log) -> None:
        self._reader = reader
        self._members = iter(reader)
        self._root = root
        self._log = log
        self._pending: TarMember | None = None

    def run(self) -> list[Path]:
        """Extract everything. Returns the paths of the checkpoints."""
        root_member = self._next()
        if root_member.name != ".":
            self._pending = root_member
        entries = parse_index(self._bytes(INDEX, MAX_INDEX_BYTES), self._reader.path)
        logs = self._read_logs()
        published: list[Path] = []
        earlier: Base | None = None
        for entry in entries:
            path = self._checkpoint(entry, earlier)
            published.append(path)
            earlier = Base(path, Manifest.read(path))
        for name, content in logs.items():
            if not os.path.lexists(self._root / name):
                commit.write_file(self._root / name, content)
        if next(self._members, None) is not None or self._pending is not None:
            raise self._unusable("it has members that its index does not list", entries[-1].name)
        return published

    def _next(self) -> TarMember:
        if self._pending is not None:
            member, self._pending = self._pending, None
            return member
        member_or_none = next(self._members, None)
        if member_or_none is None:
            raise self._unusable("it ends before its last checkpoint is complete", "")
        return member_or_none

    def _expect(self, name: str) -> TarMember:
        member = self._next()
        if member.name != name or member.is_directory:
            raise self._unusable(f"it has {member.name!r} in place of {name!r}", name)
        return member

    def _expect_file(self, checkpoint: str, path: str, manifest: Manifest) -> TarMember:
        """Return the member of a file of a checkpoint, which has the size that the manifest lists."""
        member = self._expect(f"{checkpoint}/{path}")
        size = manifest.files[path].size
        if member.nbytes != size:
            raise self._unusable(f"{path} has {member.nbytes} bytes, not {size}", checkpoint)
        return member

    def _bytes(self, name: str, limit: int) -> bytes:
        member = self._expect(name)
        if member.nbytes > limit:
            raise self._unusable(f"{name} has {member.nbytes} bytes; at most {limit} are read", "")
        return self._reader.content(member).read(member.nbytes)

    def _read_logs(self) -> dict[str, bytes]:
        """Read the logs of the run, which may be absent, in their order."""
        found: dict[str, bytes] = {}
        for name in LOGS:
            member = self._next()
            if member.name != f"{LOG_DIRECTORY}/{name}" or member.is_directory:
                self._pending = member
                continue
            if member.nbytes > MAX_LOG_BYTES:
                raise self._unusable(f"{name} has {member.nbytes} bytes", "")
            found[name] = self._reader.content(member).read(member.nbytes)
        return found

    def _checkpoint(self, entry: Entry, earlier: Base | None) -> Path:
        """Extract and publish one checkpoint. Returns its path."""
        content = self._bytes(f"{entry.name}/{layout.MANIFEST}", MAX_BYTES)
        manifest = Manifest.parse(content, self._root / entry.name / layout.MANIFEST)
        name = layout.parse_checkpoint_name(entry.name)
        if manifest.digest != entry.manifest or name != (manifest.step, manifest.epoch):
            raise self._unusable("a manifest is not the one that the index lists", entry.name)
        target = self._root / entry.name
        if os.path.lexists(target):
            return self._skip(target, manifest, earlier)
        if manifest.nbytes > _free_bytes(self._root):
            raise SaveFailed(
                "a checkpoint of the archive does not fit on the disk",
                where=str(self._root),
                value=f"{entry.name}: {size_text(manifest.nbytes)}",
                hint="free space, or extract into another directory",
            )
        self._log(f"extracting {entry.name}")
        base = base_of(entry, self._root)
        staging = commit.reserve(self._root, entry.name)
        try:
            staged = Manifest.parse(content, staging / layout.MANIFEST)
            self._files(staging, staged, base, earlier)
            commit.finalize(staging, content)
            return commit.publish(staging, entry.name)
        finally:
            commit.discard(staging)

    def _skip(self, target: Path, manifest: Manifest, earlier: Base | None) -> Path:
        """Read over a checkpoint that exists already. Raises :class:`CheckpointUnusable` for another of its name."""
        if Manifest.read(target).digest != manifest.digest:
            raise CheckpointUnusable(
                "another checkpoint of this name already exists",
                where=str(target),
                value=target.name,
                hint="extract into another run directory",
            )
        self._log(f"{target.name} exists already")
        before = earlier.manifest if earlier is not None else None
        for path in layout.tables_first(manifest.files):
            if not is_unchanged(path, manifest, before):
                self._expect_file(target.name, path, manifest)
        return target

    def _files(
        self, staging: Path, manifest: Manifest, base: Base | None, earlier: Base | None
    ) -> None:
        """Write the files of a checkpoint below *staging*, and compare them with its manifest."""
        name = str(layout.CheckpointName(manifest.step, manifest.epoch))
        segments: dict[str, list[Segment]] | None = None
        before = earlier.manifest if earlier is not None else None
        unverified: dict[str, FileRecord] = {}
        for path in layout.tables_first(manifest.files):
            record = manifest.files[path]
            target = staging / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if earlier is not None and is_unchanged(path, manifest, before):
                _link_or_copy(earlier.root, path, target)
                # The checkpoint before may not be from this archive.
                unverified[path] = record
                continue
            member = self._expect_file(name, path, manifest)
            source = self._reader.content(member)
            of_file: Sequence[Segment] = ()
            if not path.endswith(f"/{layout.SLICE_TABLE}"):
                # Not before: the tables of this checkpoint describe its segments.
                segments = segments_of(manifest, base) if segments is None else segments
                of_file = segments.get(path, ())
            with DurableFile(target, nbytes=record.size) as out:
                for data in transformed(source, record.size, of_file, base, forward=False):
                    out.write(data)
            # The digest of a file that several ranks wrote consists of those of its slices.
            if has_merkle_digest(record) or record.ranges:
                unverified[path] = record
            elif out.close() != record:
                raise self._unusable(f"{path} does not match its digest", name)
        problems = verify(staging, replace(manifest, files=unverified))
        if problems:
            raise self._unusable(f"{problems[0].what}: {problems[0].where}", name)

    def _unusable(self, value: str, checkpoint: str) -> CheckpointUnusable:
        where = str(self._reader.path)
        if checkpoint:
            where += f", {checkpoint}"
        return CheckpointUnusable(
            "the archive is damaged", where=where, value=value, hint="use another copy of the file"
        )


def _link_or_copy(root: Path, path: str, target: Path) -> None:
    """Take over a file of the checkpoint before."""
    try:
        os.link(root / path, target, follow_symlinks=False)
        fsync_file(target)
    except OSError:
        with os.fdopen(open_safely(root, path), "rb") as source, DurableFile(target) as out:
            while data := source.read(BLOCK_BYTES):
                out.write(data)
