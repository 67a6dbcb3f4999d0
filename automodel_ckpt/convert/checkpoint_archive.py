"""``ckpt archive`` and ``ckpt unarchive``: checkpoints in one compressed file, and back, bit for bit. Imports no torch.

An archive is a tar file, compressed with zstd. ``archive.json`` comes first; then, for each checkpoint, its
MANIFEST.json and the files that it lists, in the order of their names. The bytes of tensors are rearranged, so that
they compress better: of each block of a tensor, first the first bytes of all elements, then the second ones, and so on
(byte planes). With a *delta*, each tensor is combined with the same one of an earlier checkpoint by XOR before: bits
that did not change become zeros. Both keep the size of a file, and extraction inverts them. A file that the checkpoint
before in the archive has with the same digest is not stored again.

Everything that is extracted is compared with the digests of the manifest before the checkpoint is published.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.digests import FileRecord
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.export_leftovers import Log
from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.manifest import MAX_BYTES, Manifest
from automodel_ckpt.checkpoint.merkle import has_merkle_digest
from automodel_ckpt.checkpoint.policy import KeepPolicy
from automodel_ckpt.checkpoint.run import maintenance, resume
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.slices import Slice, contiguous_slices
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.convert.publishing import published_file
from automodel_ckpt.convert.tar_reading import TarFault, TarMember, TarReader
from automodel_ckpt.convert.tar_writing import TarWriter
from automodel_ckpt.durable_io import fsync_file
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, SaveFailed
from automodel_ckpt.units import size_text

FORMAT = "automodel_ckpt.archive"
FORMAT_VERSION = 1
_INDEX = "archive.json"
_MAX_INDEX_BYTES = 4 << 20
_MAX_LOG_BYTES = 1 << 32
# Also the unit of the rearrangement: another value is another format.
_BLOCK_BYTES = 4 << 20
_LOGS = (
    layout.TRAINING_LOG,
    layout.VALIDATION_LOG,
    layout.TIMELINE_LOG,
    layout.LATE_VALIDATIONS,
)
_LOG_DIRECTORY = "run"
_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}", re.ASCII)
# zstd decoders need this much memory at most.
_MAX_WINDOW_BYTES = 128 << 20
_LEVEL = 3
_NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in an archive: its name, the digest of its manifest, and its base (name, digest of the manifest).

    The tensors are stored as differences to the base; None if they are complete.
    """

    name: str
    manifest: str
    base: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of :func:`archive`: the archive, the checkpoints in it, and bytes before and after."""

    path: Path
    names: Sequence[str]
    nbytes: int
    archive_bytes: int


# ---------------------------------------------------------------- writing


def archive(source: Path, target: Path, *, delta: bool, level: int = _LEVEL, log: Log) -> Archived:
    """Write the checkpoint, or all complete checkpoints of the run directory, *source* to the file *target*.

    With *delta*, each checkpoint of a run is stored as a difference to the one before; a single checkpoint as a
    difference to the one before it in its run directory, which must be present when it is extracted. Raises
    :class:`CheckpointUnusable` for a damaged checkpoint, :class:`RecipeError` without the library zstandard.
    """
    zstandard = _zstandard()
    is_run = layout.parse_checkpoint_name(source.name) is None
    checkpoints = _checkpoints_in(source) if is_run else [source]
    manifests = [_intact_manifest(checkpoint) for checkpoint in checkpoints]
    entries = _entries(checkpoints, manifests, delta=delta)
    index = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "checkpoints": [
            {"name": entry.name, "manifest": entry.manifest, "base": entry.base}
            for entry in entries
        ],
    }
    with published_file(target, log, what="the archive") as staging:
        compressor = zstandard.ZstdCompressor(
            level=level, threads=_NUM_THREADS, write_checksum=True
        )
        with open(staging, "wb") as file, compressor.stream_writer(file, closefd=False) as out:
            writer = TarWriter(out)
            writer.add_bytes(_INDEX, json.dumps(index, indent=2).encode() + b"\n")
            if is_run:
                for name in _LOGS:
                    with contextlib.suppress(FileNotFoundError):
                        content = read_safely(source, name, limit=_MAX_LOG_BYTES)
                        writer.add_bytes(f"{_LOG_DIRECTORY}/{name}", content)
            earlier: Manifest | None = None
            for checkpoint, manifest, entry in zip(checkpoints, manifests, entries, strict=True):
                log(f"archiving {entry.name}")
                base = _base_of(entry, checkpoint.parent)
                _add_checkpoint(writer, checkpoint, manifest, base, earlier)
                earlier = manifest
            writer.finish()
        archive_bytes = staging.stat().st_size
    return Archived(
        target,
        [entry.name for entry in entries],
        sum(manifest.nbytes for manifest in manifests),
        archive_bytes,
    )


def _checkpoints_in(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run directory, the oldest first."""
    found = [run / record.name for record in resume.records(run, "")]
    if not found:
        raise CheckpointUnusable(
            "there is no complete checkpoint to archive",
            where=str(run),
            value="no checkpoint",
            hint="name a run directory or a checkpoint",
        )
    return found[::-1]


def _intact_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint, and compare all its files with it. Raises :class:`CheckpointUnusable`."""
    manifest = Manifest.read(checkpoint)
    problems = verify(checkpoint, manifest)
    if problems:
        raise CheckpointUnusable.all_of(problems)
    return manifest


def _entries(
    checkpoints: Sequence[Path], manifests: Sequence[Manifest], *, delta: bool
) -> list[Entry]:
    entries: list[Entry] = []
    for checkpoint, manifest in zip(checkpoints, manifests, strict=True):
        base: tuple[str, str] | None = None
        if delta and entries:
            base = entries[-1].name, entries[-1].manifest
        elif delta and len(checkpoints) == 1:
            base = _checkpoint_before(checkpoint)
        entries.append(Entry(checkpoint.name, manifest.digest, base))
    return entries


def _checkpoint_before(checkpoint: Path) -> tuple[str, str]:
    """Return (name, digest of the manifest) of the newest complete checkpoint before *checkpoint* in its run."""
    own = layout.parse_checkpoint_name(checkpoint.name)
    for record in resume.records(checkpoint.parent, ""):
        if own is not None and (record.step, record.epoch) < own:
            return record.name, Manifest.read(checkpoint.parent / record.name).digest
    raise CheckpointUnusable(
        "there is no earlier checkpoint for a delta",
        where=str(checkpoint.parent),
        value=checkpoint.name,
        hint="leave out --delta",
    )


def _add_checkpoint(
    writer: TarWriter,
    checkpoint: Path,
    manifest: Manifest,
    base: Base | None,
    earlier: Manifest | None,
) -> None:
    content = read_safely(checkpoint, layout.MANIFEST, limit=MAX_BYTES)
    writer.add_bytes(f"{checkpoint.name}/{layout.MANIFEST}", content)
    segments = _segments(manifest, base)
    for path in layout.tables_first(manifest.files):
        if _is_unchanged(path, manifest, earlier):
            continue
        nbytes = manifest.files[path].size
        with os.fdopen(open_safely(checkpoint, path), "rb") as source:

            def write(target: BinaryIO, source: BinaryIO = source, path: str = path) -> None:
                size = manifest.files[path].size
                for data in _transformed(source, size, segments.get(path, ()), base, forward=True):
                    target.write(data)

            writer.add_sized(f"{checkpoint.name}/{path}", nbytes, write)


def _is_unchanged(path: str, manifest: Manifest, earlier: Manifest | None) -> bool:
    """Whether the checkpoint before in the archive has a file of the same name, size and digest."""
    return earlier is not None and earlier.files.get(path) == manifest.files[path]


# ---------------------------------------------------------------- rearranging bytes


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that differences refer to."""

    root: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes ``start .. start + nbytes`` of a file, elements of *itemsize* bytes, and the same tensor in the base.

    *base* is its slice in the files of the base; None if the base has no such slice.
    """

    start: int
    nbytes: int
    itemsize: int
    base: Slice | None


def _segments(manifest: Manifest, base: Base | None) -> dict[str, list[Segment]]:
    """Map each file to the byte ranges of its tensors, in their order. It depends only on the two manifests."""
    in_base = _slices_by_key(base.manifest) if base is not None else {}
    found: dict[str, list[Segment]] = {}
    for key, piece in _slices_by_key(manifest).items():
        if piece.nbytes:
            itemsize = max(1, DTYPE_BITS[piece.dtype] // 8)
            segment = Segment(piece.start, piece.nbytes, itemsize, in_base.get(key))
            found.setdefault(piece.file, []).append(segment)
    for segments in found.values():
        segments.sort(key=lambda segment: segment.start)
    return found


def _slices_by_key(manifest: Manifest) -> dict[tuple[object, ...], Slice]:
    """Map (tree, whether it is a copy, name, dtype, offsets, sizes) to each slice; interleaved slices are one."""
    found: dict[tuple[object, ...], Slice] = {}
    for name, tree in manifest.trees.items():
        for is_copy, tensors in ((False, tree.tensors), (True, tree.copies)):
            for fqn, tensor in tensors.items():
                for piece in contiguous_slices(tensor):
                    key = (name, is_copy, fqn, piece.dtype, piece.offsets, piece.sizes)
                    found[key] = piece
    return found


def _transformed(
    source: BinaryIO,
    size: int,
    segments: Sequence[Segment],
    base: Base | None,
    *,
    forward: bool,
) -> Iterator[bytes]:
    """Yield the content of a file of *size* bytes, rearranged (*forward*) or restored, in blocks.

    *source* is read from its beginning to its end.
    """
    position = 0
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        for segment in (*segments, Segment(size, 0, 1, None)):
            yield from _copied(source, segment.start - position)
            block_bytes = _BLOCK_BYTES // segment.itemsize * segment.itemsize
            for offset in range(0, segment.nbytes, block_bytes):
                length = min(block_bytes, segment.nbytes - offset)
                reference = None
                if segment.base is not None and base is not None:
                    reference = _read_base(segment.base, base, offset, length, opened, stack)
                data = _read_exactly(source, length)
                yield _planes(data, segment.itemsize, reference, forward=forward)
            position = segment.start + segment.nbytes


def _planes(data: bytes, itemsize: int, reference: bytes | None, *, forward: bool) -> bytes:
    """Combine a block with *reference* by XOR and divide it into byte planes, or restore it."""
    values = np.frombuffer(data, np.uint8)
    if forward and reference is not None:
        values = values ^ np.frombuffer(reference, np.uint8)
    shape = (-1, itemsize) if forward else (itemsize, -1)
    # A size that is not a multiple is that of a damaged manifest; `Manifest.fault` excludes it.
    values = np.ascontiguousarray(values.reshape(shape).T).reshape(-1)
    if not forward and reference is not None:
        values = values ^ np.frombuffer(reference, np.uint8)
    return values.tobytes()


def _read_base(
    piece: Slice,
    base: Base,
    offset: int,
    length: int,
    opened: dict[str, int],
    stack: contextlib.ExitStack,
) -> bytes:
    """Read a part of a slice of the base. Files stay open until *stack* is closed."""
    if piece.file not in opened:
        descriptor = open_safely(base.root, piece.file)
        stack.callback(os.close, descriptor)
        opened[piece.file] = descriptor
    data = os.pread(opened[piece.file], length, piece.start + offset)
    if len(data) != length:
        raise CheckpointUnusable(
            "a file of the base is too short",
            where=str(base.root / piece.file),
            value=f"{len(data)} of {length} bytes at {piece.start + offset}",
            hint="run `ckpt verify` on the base",
        )
    return data


def _copied(source: BinaryIO, nbytes: int) -> Iterator[bytes]:
    while nbytes > 0:
        data = _read_exactly(source, min(nbytes, _BLOCK_BYTES))
        nbytes -= len(data)
        yield data


def _read_exactly(source: BinaryIO, nbytes: int) -> bytes:
    data = source.read(nbytes)
    if len(data) != nbytes:
        raise TarFault("a file is shorter than its manifest states")
    return data


# ---------------------------------------------------------------- extracting


def extract(path: Path, run: Path, *, log: Log) -> list[Path]:
    """Extract all checkpoints of the archive *path* into the run directory *run*; return their paths.

    Checkpoints that exist already with the same manifest are skipped. Raises :class:`CheckpointUnusable` for a damaged
    or hostile archive, a base that is missing, and a name that another checkpoint has; :class:`SaveFailed` if a
    checkpoint cannot be written. What was published before stays; nothing else remains.
    """
    directory = RunDirectory(run, KeepPolicy(), "val_loss")
    try:
        # The lease first: recover() removes staging directories, which a live run may be writing.
        directory.hold()
        maintenance.recover(directory.root)
        reader = ZstdTarReader(path, _free_bytes(directory.root))
        with reader:
            published = _Extraction(reader, directory.root, log).run()
        # Sets LATEST and LOWEST_VAL to the newest and the best checkpoint.
        directory.candidates(None)
        return published
    except OSError as error:
        raise as_failure(error, f"extracting {path}", run) from error
    finally:
        directory.release()


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


class ZstdTarReader(TarReader):
    """A tar archive that is compressed with zstd. It may unpack to at most *max_bytes*: what fits on the disk."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path)
        zstandard = _zstandard()
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        stream = decompressor.stream_reader(self._raw, read_across_frames=True, closefd=False)
        self._file = cast(BinaryIO, _Decompressed(stream, zstandard.ZstdError))
        self.is_compressed = True
        self._max_bytes = max_bytes

    def content(self, member: TarMember) -> BinaryIO:
        """Return the content of the member that was just yielded as a file that is read once."""
        return cast(BinaryIO, _Content(self.blocks(member, _BLOCK_BYTES)))


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
        entries = _parse_index(self._bytes(_INDEX, _MAX_INDEX_BYTES), self._reader.path)
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

    def _bytes(self, name: str, limit: int) -> bytes:
        member = self._expect(name)
        if member.nbytes > limit:
            raise self._unusable(f"{name} has {member.nbytes} bytes; at most {limit} are read", "")
        return self._reader.content(member).read(member.nbytes)

    def _read_logs(self) -> dict[str, bytes]:
        """Read the logs of the run, which may be absent, in their order."""
        found: dict[str, bytes] = {}
        for name in _LOGS:
            member = self._next()
            if member.name != f"{_LOG_DIRECTORY}/{name}" or member.is_directory:
                self._pending = member
                continue
            if member.nbytes > _MAX_LOG_BYTES:
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
        base = _base_of(entry, self._root)
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
            if not _is_unchanged(path, manifest, before):
                self._expect(f"{target.name}/{path}")
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
            if earlier is not None and _is_unchanged(path, manifest, before):
                _link_or_copy(earlier.root, path, target)
                # The checkpoint before may not be from this archive.
                unverified[path] = record
                continue
            member = self._expect(f"{name}/{path}")
            if member.nbytes != record.size:
                raise self._unusable(f"{path} has {member.nbytes} bytes, not {record.size}", name)
            source = self._reader.content(member)
            of_file: Sequence[Segment] = ()
            if not path.endswith(f"/{layout.SLICE_TABLE}"):
                # Not before: the tables of this checkpoint describe its segments.
                segments = _segments(manifest, base) if segments is None else segments
                of_file = segments.get(path, ())
            with DurableFile(target, nbytes=record.size) as out:
                for data in _transformed(source, record.size, of_file, base, forward=False):
                    out.write(data)
            # The digest of a file that several ranks wrote consists of those of its slices.
            if has_merkle_digest(record):
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
            while data := source.read(_BLOCK_BYTES):
                out.write(data)


def _base_of(entry: Entry, run: Path) -> Base | None:
    """Return the base of a checkpoint in *run*; None if it needs none. Raises :class:`CheckpointUnusable`."""
    if entry.base is None:
        return None
    name, digest = entry.base
    try:
        manifest = Manifest.read(run / name)
    except CheckpointUnusable:
        manifest = None
    if manifest is None or manifest.digest != digest:
        raise CheckpointUnusable(
            "the checkpoint that this archive contains only the differences to is not here",
            where=str(run),
            value=name,
            hint=f"extract the archive of {name} into this directory before",
        )
    return Base(run / name, manifest)


def _parse_index(content: bytes, path: Path) -> list[Entry]:
    """Parse archive.json. Raises :class:`CheckpointUnusable` for anything that :func:`archive` does not write."""
    try:
        raw = parse_json(content)
        if raw["format"] != FORMAT:
            raise ValueError("it is not an archive of checkpoints")
        if raw["format_version"] != FORMAT_VERSION:
            raise ValueError("its format is of another version")
        entries = [_parse_entry(item) for item in raw["checkpoints"]]
        if not entries or len({entry.name for entry in entries}) != len(entries):
            raise ValueError("it lists no checkpoint, or one twice")
        return entries
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointUnusable(
            "the index of the archive is invalid",
            where=str(path),
            value=str(error)[:200],
            hint="use a file that `ckpt archive` wrote",
        ) from error


def _parse_entry(raw: Mapping[str, Any]) -> Entry:
    base = raw["base"]
    if base is not None:
        name, digest = base
        base = _checked(name, digest)
    return Entry(*_checked(raw["name"], raw["manifest"]), base)


def _checked(name: object, digest: object) -> tuple[str, str]:
    """Check a name and a digest, which become parts of paths and messages. Raises ValueError."""
    if not isinstance(name, str) or layout.parse_checkpoint_name(name) is None:
        raise ValueError("a name is not that of a checkpoint")
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ValueError("a digest is invalid")
    return name, digest


def _zstandard() -> Any:
    """Import the library zstandard. Raises :class:`RecipeError` if it is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise RecipeError(
            "archives need the library zstandard",
            where="ckpt archive",
            value="not installed",
            hint="pip install 'automodel_ckpt[archive]'",
        ) from error
