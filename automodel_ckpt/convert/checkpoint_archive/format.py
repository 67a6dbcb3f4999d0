"""The format of archives of checkpoints, and their index. Imports no torch.

An archive is a tar file, compressed with zstd. ``archive.json`` comes first; then, for each checkpoint, its
MANIFEST.json and the files that it lists, in the order of their names. The bytes of tensors are rearranged, so that
they compress better: of each block of a tensor, first the first bytes of all elements, then the second ones, and so on
(byte planes). With a *delta*, each tensor is combined with the same one of an earlier checkpoint by XOR before: bits
that did not change become zeros. Both keep the size of a file, and extraction inverts them. A file that the checkpoint
before in the archive has with the same digest is not stored again.

Everything that is extracted is compared with the digests of the manifest before the checkpoint is published.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.convert.checkpoint_archive.byte_planes import Base
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

FORMAT = "automodel_ckpt.archive"
FORMAT_VERSION = 1
INDEX = "archive.json"
MAX_INDEX_BYTES = 4 << 20
MAX_LOG_BYTES = 1 << 32
LOGS = (
    layout.TRAINING_LOG,
    layout.VALIDATION_LOG,
    layout.TIMELINE_LOG,
    layout.LATE_VALIDATIONS,
    layout.TEXT_LOG,
)
LOG_DIRECTORY = "run"
_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}", re.ASCII)
# zstd decoders need this much memory at most.
MAX_WINDOW_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in an archive: its name, the digest of its manifest, and its base (name, digest of the manifest).

    The tensors are stored as differences to the base; None if they are complete.
    """

    name: str
    manifest: str
    base: tuple[str, str] | None = None


def parse_index(content: bytes, path: Path) -> list[Entry]:
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


def base_of(entry: Entry, run: Path) -> Base | None:
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


def zstandard_library() -> Any:
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


def is_unchanged(path: str, manifest: Manifest, earlier: Manifest | None) -> bool:
    """Whether the checkpoint before in the archive has a file of the same name, size and digest."""
    return earlier is not None and earlier.files.get(path) == manifest.files[path]
