"""``ckpt archive``: write checkpoints to one compressed file. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from automodel_ckpt.checkpoint.export.export_leftovers import Log
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.manifest_file import MAX_BYTES
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.convert.checkpoint_archive.byte_planes import Base, segments_of, transformed
from automodel_ckpt.convert.checkpoint_archive.format import (
    FORMAT,
    FORMAT_VERSION,
    INDEX,
    LOG_DIRECTORY,
    LOGS,
    MAX_LOG_BYTES,
    Entry,
    base_of,
    is_unchanged,
    zstandard_library,
)
from automodel_ckpt.convert.formats.nemo.tar_writing import TarWriter
from automodel_ckpt.convert.publishing import published_file
from automodel_ckpt.errors import CheckpointUnusable

_LEVEL = 3
_NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of :func:`archive`: the archive, the checkpoints in it, and bytes before and after."""

    path: Path
    names: Sequence[str]
    nbytes: int
    archive_bytes: int


def archive(source: Path, target: Path, *, delta: bool, level: int = _LEVEL, log: Log) -> Archived:
    """Write the checkpoint, or all complete checkpoints of the run directory, *source* to the file *target*.

    With *delta*, each checkpoint of a run is stored as a difference to the one before; a single checkpoint as a
    difference to the one before it in its run directory, which must be present when it is extracted. Raises
    :class:`CheckpointUnusable` for a damaged checkpoint, :class:`RecipeError` without the library zstandard.
    """
    zstandard = zstandard_library()
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
            writer.add_bytes(INDEX, json.dumps(index, indent=2).encode() + b"\n")
            if is_run:
                for name in LOGS:
                    with contextlib.suppress(FileNotFoundError):
                        content = read_safely(source, name, limit=MAX_LOG_BYTES)
                        writer.add_bytes(f"{LOG_DIRECTORY}/{name}", content)
            earlier: Manifest | None = None
            for checkpoint, manifest, entry in zip(checkpoints, manifests, entries, strict=True):
                log(f"archiving {entry.name}")
                base = base_of(entry, checkpoint.parent)
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
    segments = segments_of(manifest, base)
    for path in layout.tables_first(manifest.files):
        if is_unchanged(path, manifest, earlier):
            continue
        nbytes = manifest.files[path].size
        with os.fdopen(open_safely(checkpoint, path), "rb") as source:

            def write(target: BinaryIO, source: BinaryIO = source, path: str = path) -> None:
                size = manifest.files[path].size
                for data in transformed(source, size, segments.get(path, ()), base, forward=True):
                    target.write(data)

            writer.add_sized(f"{checkpoint.name}/{path}", nbytes, write)
