"""The files of a model that another program packed in one tar archive, or left in a directory. Imports no torch.

In an archive each file is a byte range, so that its tensors are slices of the archive: nothing is unpacked. Only an
archive that is compressed with gzip is decompressed first. Formats that exist in both forms (NeMo, TensorRT-LLM) read
both through :class:`PackedFiles`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.checkpoint.files.safe_open import open_safely, without_links
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.decoded import decoded_directory
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    faults_of,
    first_bytes,
    is_gzip,
)
from automodel_ckpt.convert.formats.nemo.tar_files import (
    TarReader,
    decompress,
)
from automodel_ckpt.errors import CheckpointUnusable

_DECOMPRESSED = "archive.tar"
_MAX_DEPTH = 8
_MAX_FILES = 100_000


@dataclass(frozen=True)
class StoredFile:
    """*nbytes* at byte *start* of the file *file*, which is relative to the root of its :class:`PackedFiles`."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class PackedFiles:
    """The files in *path*, an archive or a directory, by relative name. Their bytes are in files below *root*."""

    path: Path
    root: Path
    files: Mapping[str, StoredFile]

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file of at most *limit* bytes. Raises :class:`CheckpointUnusable`."""
        with faults_of(self.path / name, f"the file {name} of the model cannot be read"):
            stored = self.files.get(name)
            if stored is None or stored.nbytes > limit:
                raise Fault("no such file" if stored is None else f"it has more than {limit} bytes")
            with open(open_safely(self.root, stored.file), "rb") as file:
                file.seek(stored.start)
                content = file.read(stored.nbytes)
            if len(content) < stored.nbytes:
                raise Fault(f"it is truncated: {len(content)} bytes")
            return content


def has_member(path: Path, name: str) -> bool:
    """Return whether the archive *path*, a tar or gzip file, contains *name* before any damage.

    If the archive is compressed with gzip, everything before that member is decompressed.
    """
    try:
        with TarReader(without_links(path)) as reader:
            return any(member.name == name for member in reader)
    except CheckpointUnusable:
        return False


def packed_files(path: Path) -> PackedFiles:
    """Describe the files in *path*, an archive or a directory."""
    return files_in_directory(path) if path.is_dir() else files_in_archive(path)


def files_in_archive(path: Path) -> PackedFiles:
    """Describe the files in the archive *path*. Symbolic links to it are followed.

    One that is compressed with gzip is decompressed to a temporary file (``decoded.py``), once for all processes that
    read it. Raises :class:`CheckpointUnusable` if it is damaged.
    """
    real = without_links(path)
    if is_gzip(first_bytes(real, 2)):
        directory = decoded_directory(
            real, "gzip", lambda place: decompress(real, place / _DECOMPRESSED)
        )
        real = directory / _DECOMPRESSED
    with TarReader(real) as reader:
        files = {
            member.name: StoredFile(real.name, member.start, member.nbytes)
            for member in reader
            if not member.is_directory
        }
    return PackedFiles(path, real.parent, files)


def files_in_directory(path: Path) -> PackedFiles:
    """Describe the files in the directory *path* and its subdirectories.

    Raises :class:`CheckpointUnusable` for a symbolic link, a special or sparse file, a directory that cannot be read,
    and for more files than a model has.
    """
    files: dict[str, StoredFile] = {}
    with faults_of(path, "this directory cannot be read"):
        for parent, directories, names in walk(path):
            relative = os.path.relpath(parent, path)
            # os.walk() does not enter links to directories. As files, they are rejected.
            links = [name for name in directories if os.path.islink(f"{parent}/{name}")]
            check_regular_files(Path(parent), [*links, *names])
            if relative.count("/") >= _MAX_DEPTH or len(files) + len(names) > _MAX_FILES:
                raise Fault(f"it has more files than a model: {relative}")
            for name in names:
                file = os.path.normpath(os.path.join(relative, name))
                files[file] = StoredFile(file, 0, os.lstat(os.path.join(parent, name)).st_size)
    return PackedFiles(path, path, files)
