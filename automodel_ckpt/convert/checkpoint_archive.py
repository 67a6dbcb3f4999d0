"""``ckpt archive`` and ``ckpt unarchive``: checkpoints in one compressed file, and back, bit for bit. Imports no torch.

An archive is a tar file, compressed with zstd. For each checkpoint it has MANIFEST.json and then the files that this
manifest lists, in the order of their names. The logs of a run come last. `tar --zstd -xf` extracts the same files.

Every file is compared with the digests of its manifest before a checkpoint is archived or published.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from automodel_ckpt.checkpoint.export.files import Log
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import MAX_BYTES, Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.convert.formats.files import library
from automodel_ckpt.convert.formats.nemo.tar_files import TarMember, TarReader, TarWriter
from automodel_ckpt.convert.publishing import held_run, published_file
from automodel_ckpt.errors import CheckpointUnusable, unusable

_NUM_THREADS = 2
_MAX_LOG_BYTES = 1 << 32
# zstd decoders need this much memory at most.
_MAX_WINDOW_BYTES = 128 << 20
_LOGS = (
    layout.TRAINING_LOG,
    layout.VALIDATION_LOG,
    layout.TIMELINE_LOG,
    layout.LATE_VALIDATIONS,
    layout.TEXT_LOG,
)


def archive(source: Path, target: Path, *, level: int, log: Log) -> tuple[list[str], int, int]:
    """Write the checkpoint, or all complete checkpoints of the run directory, *source* to the file *target*.

    Returns:
        The names of the checkpoints, and their bytes before and after.

    Raises:
        CheckpointUnusable: A checkpoint is damaged.
        RecipeError: The library zstandard is not installed.
    """
    zstandard = library("zstandard", "an archive", "ckpt archive", "archive")
    is_run = layout.parse_checkpoint_name(source.name) is None
    checkpoints = [source]
    if is_run:
        # The oldest first.
        checkpoints = [source / record.name for record in resume.records(source, "")][::-1]
    if not checkpoints:
        raise unusable(
            "there is no complete checkpoint to archive",
            source,
            "no checkpoint",
            "name a run directory or a checkpoint",
        )
    manifests = [Manifest.read(checkpoint) for checkpoint in checkpoints]
    for checkpoint, manifest in zip(checkpoints, manifests, strict=True):
        CheckpointUnusable.check(verify(checkpoint, manifest))
    with published_file(target, log, what="the archive") as staging:
        compressor = zstandard.ZstdCompressor(
            level=level, threads=_NUM_THREADS, write_checksum=True
        )
        with open(staging, "wb") as file, compressor.stream_writer(file, closefd=False) as out:
            writer = TarWriter(out)
            for checkpoint, manifest in zip(checkpoints, manifests, strict=True):
                log(f"archiving {checkpoint.name}")
                for path in (layout.MANIFEST, *sorted(manifest.files)):
                    writer.add_file(f"{checkpoint.name}/{path}", checkpoint, path)
            for name in _LOGS:
                if is_run and (source / name).is_file():
                    writer.add_file(name, source, name)
            writer.finish()
        archive_bytes = staging.stat().st_size
    nbytes = sum(manifest.nbytes for manifest in manifests)
    return [checkpoint.name for checkpoint in checkpoints], nbytes, archive_bytes


def extract(path: Path, run: Path, *, log: Log) -> list[Path]:
    """Extract all checkpoints of the archive *path* into the run directory *run*; return their paths.

    Checkpoints that exist already with the same manifest are skipped. What was published before a failure stays.
    Nothing else remains.

    Raises:
        CheckpointUnusable: The archive is damaged or hostile, or another checkpoint has one of its names.
        SaveFailed: A checkpoint cannot be written.
    """
    zstandard = library("zstandard", "an archive", "ckpt unarchive", "archive")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    decompressed = partial(decompressor.stream_reader, read_across_frames=True, closefd=False)
    try:
        # Before a run directory is created. The manifests limit the members and their sizes.
        reader = TarReader(path, decompressed, (zstandard.ZstdError,), max_members=None)
    except OSError as error:
        what, hint = "the archive cannot be read", "check the path and its permissions"
        raise CheckpointUnusable.of_system(error, what, hint=hint) from error
    with reader, held_run(run, f"extracting {path}") as directory:
        published = _Extraction(reader, directory.root, log).run()
        # Sets LATEST and LOWEST_VAL to the newest and the best checkpoint.
        directory.candidates(None)
    return published


class _Extraction:
    """Extracts the members of an archive, in their order, into the run directory *root*."""

    def __init__(self, reader: TarReader, root: Path, log: Log) -> None:
        self._reader = reader
        self._members = (member for member in reader if member.name != ".")
        self._root = root
        self._log = log

    def run(self) -> list[Path]:
        """Extract everything. Returns the paths of the checkpoints."""
        published = []
        logs = {}
        for member in self._members:
            name, _, file = member.name.partition("/")
            if member.name in _LOGS and not member.is_directory:
                logs[name] = self._bytes(member, _MAX_LOG_BYTES)
            elif file == layout.MANIFEST and layout.parse_checkpoint_name(name) is not None:
                published.append(self._checkpoint(name, self._bytes(member, MAX_BYTES)))
            else:
                raise self._unusable(f"{member.name!r} is not listed by a manifest before it")
        if not published:
            raise self._unusable("it has no checkpoint")
        for name, content in logs.items():
            if not os.path.lexists(self._root / name):
                commit.write_file(self._root / name, content)
        return published

    def _bytes(self, member: TarMember, limit: int) -> bytes:
        if member.nbytes > limit:
            raise self._unusable(f"{member.name} has {member.nbytes} bytes; at most {limit}")
        return b"".join(self._reader.blocks(member))

    def _checkpoint(self, name: str, content: bytes) -> Path:
        """Extract and publish the checkpoint *name* with the manifest *content*. Returns its path."""
        target = self._root / name
        manifest = Manifest.parse(content, target / layout.MANIFEST)
        if layout.parse_checkpoint_name(name) != (manifest.step, manifest.epoch):
            raise self._unusable(f"the manifest of {name} belongs to another checkpoint")
        if os.path.lexists(target):
            if Manifest.read(target).digest != manifest.digest:
                raise unusable(
                    "another checkpoint of this name already exists",
                    target,
                    name,
                    "extract into another run directory",
                )
            self._log(f"{name} exists already")
            self._files(name, manifest, None)
            return target
        self._log(f"extracting {name}")
        staging = commit.reserve(self._root, name)
        try:
            self._files(name, manifest, staging)
            problems = verify(staging, Manifest.parse(content, staging / layout.MANIFEST))
            if problems:
                raise self._unusable(f"{problems[0].what}: {problems[0].where}")
            commit.finalize(staging, content)
            return commit.publish(staging, name)
        finally:
            commit.discard(staging)

    def _files(self, name: str, manifest: Manifest, staging: Path | None) -> None:
        """Read the files of a checkpoint, which must be the next members, and write them below *staging*, if given."""
        for path in sorted(manifest.files):
            member = next(self._members, None)
            expected = f"{name}/{path} of {manifest.files[path].size} bytes"
            if member is None:
                raise self._unusable(f"it ends before {expected}")
            found = f"{member.name} of {member.nbytes} bytes"
            if member.is_directory or found != expected:
                raise self._unusable(f"it has {found} in place of {expected}")
            if staging is None:
                continue
            target = staging / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise self._unusable(f"{member.name!r} is in a file") from None
            with DurableFile(target, nbytes=member.nbytes) as out:
                for block in self._reader.blocks(member):
                    out.write(block)

    def _unusable(self, value: str) -> CheckpointUnusable:
        return unusable("the archive is damaged", self._reader.path, value)
