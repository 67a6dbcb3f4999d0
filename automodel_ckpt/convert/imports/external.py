"""Descriptions of directories of other programs for display: nothing in them can be verified. Imports no torch.

A directory can contain several formats, such as a checkpoint of NeMo AutoModel (``model/``, ``optim/``).
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Counts, Values
from automodel_ckpt.checkpoint.parts.manifest import has_manifest
from automodel_ckpt.checkpoint.sources.model_files import unreadable
from automodel_ckpt.convert.formats.files import names_in, optional_json
from automodel_ckpt.convert.formats.format import Details, Format, Inventory
from automodel_ckpt.convert.formats.registry import detect, formats_in
from automodel_ckpt.convert.imports.file_names import NameMetadata, parse_name
from automodel_ckpt.convert.imports.source_files import check_links_of_weights
from automodel_ckpt.errors import CheckpointUnusable, Problem

# The directory may be anything, and the list is only displayed.
_MAX_FILES = 100_000
_MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class ExternalTree:
    """A directory with tensors: its format and their inventory, or the *problems* due to which it cannot be read.

    *details* are further lines about it, by section title.
    """

    format: Format
    inventory: Inventory
    problems: tuple[Problem, ...] = ()
    details: Details = field(default_factory=dict)


@dataclass(frozen=True)
class ExternalDirectory:
    """A directory or a single file of another program.

    *formats* maps relative paths (``.``: itself) to formats, and *files* relative paths to sizes in bytes. *losses* is
    the content of losses.json, and *written* the time of the last change (seconds since 1970).
    """

    path: Path
    formats: Mapping[str, Format]
    files: Counts
    losses: Values
    written: float

    @property
    def kind(self) -> str:
        """The formats in words: ``model: safetensors shards, optim: PyTorch DCP``."""
        words = [
            known.name if name == "." else f"{name}: {known.name}"
            for name, known in self.formats.items()
        ]
        return ", ".join(words)

    def trees(self) -> dict[str, ExternalTree]:
        """Return the tensors of each directory, from headers and metadata: no tensor is read."""
        return {name: _tree(self.path / name, known) for name, known in self.formats.items()}

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def read_external(directory: Path) -> ExternalDirectory | None:
    """Return the content of *directory* or of a single file; None without a known format, or for a checkpoint of this
    program."""
    if directory.is_dir() and has_manifest(directory):
        return None
    formats = formats_in(directory)
    if not formats:
        return None
    status = directory.stat()
    files: dict[str, int] = {directory.name: status.st_size}
    losses: Values = {}
    if directory.is_dir():
        files, losses = dict(_files(directory)), losses_in(directory, formats.get("."))
    return ExternalDirectory(directory, formats, files, losses, status.st_mtime)


def losses_in(directory: Path, known: Format | None = None) -> Values:
    """Return the losses that the files of a format state, or the content of losses.json. Empty if there are none."""
    stated = known.losses(directory) if known is not None else {}
    if stated:
        return stated
    return optional_json(directory, layout.LOSSES)


def _tree(directory: Path, known: Format) -> ExternalTree:
    details: Details = {}
    try:
        # First: if a model's weights cannot be read here, its config is still shown.
        details = known.details(directory)
        if directory.is_dir():
            check_links_of_weights(directory)
        return ExternalTree(known, known.inventory(directory), details=details)
    except CheckpointUnusable as error:
        problems = error.problems
    except OSError as error:
        problems = (unreadable(error),)
    return ExternalTree(known, Inventory({}), problems, details)


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield relative paths and sizes in bytes. A link to a file, as in the Hub's cache, has the size of the file."""
    paths = (
        os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names
    )
    for path in sorted(itertools.islice(paths, _MAX_FILES)):
        with suppress(FileNotFoundError):  # a file that is being written or removed
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode) and os.path.isfile(path):
                status = os.stat(path)
            yield os.path.relpath(path, directory), status.st_size


def named_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of other programs in *directory* with a step, an epoch or a metric in their names.

    Links and hidden names are skipped. Empty if *directory* is a checkpoint itself, such as a directory of DeepSpeed
    with its tags, or no directory.
    """
    if not directory.is_dir() or detect(directory, readable_only=True) is not None:
        return []
    found = []
    for name in names_in(directory)[:_MAX_ENTRIES]:
        path = directory / name
        is_ordinary = not path.is_symlink() and (path.is_dir() or path.is_file())
        is_named = not name.startswith(".") and parse_name(name) != NameMetadata()
        if is_named and is_ordinary and formats_in(path):
            found.append(path)
    return found
