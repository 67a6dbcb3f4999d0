"""Identify the base model of an adapter by a name, to find it, and by a digest of its content.

The digest covers the bytes of ``config.json`` and of the weight files, so that a base with other values in the same
shapes has another digest. The files are read once. The digest is then cached, and valid while the files' sizes, inodes
and times are unchanged. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.durable_file import file_record
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.run.notes import read_note, write_note
from automodel_ckpt.errors import RecipeError, os_problem

_SINGLES = ("model.safetensors", "pytorch_model.bin")
_NUM_THREADS = 4


@dataclass(frozen=True)
class BaseIdentity:
    """A base model: the *name* that finds it (Hub name or absolute path), for a local one its path *relative* to the
    run's directory, and the digests of its files."""

    name: str
    relative: str | None
    files: Mapping[str, FileRecord]

    @property
    def digest(self) -> str:
        """One digest of all files. It does not depend on the base's name."""
        lines = [f"{name} {record.digest}\n" for name, record in sorted(self.files.items())]
        return digest_of("".join(lines).encode())

    def to_dict(self) -> ValueDict:
        """Return the identity as values for JSON."""
        files = {name: asdict(record) for name, record in self.files.items()}
        return {
            "name": self.name,
            "relative_to_run": self.relative,
            "digest": self.digest,
            "files": files,
        }


def identify_base(
    name: str, directory: Path, *, run: Path | str | None, cache: Path | None = None
) -> BaseIdentity:
    """Return the identity of the base called *name* with files in *directory*. Digests are stored in *cache*.

    Raises :class:`RecipeError` if there are no weight files, or they cannot be read.
    """
    relative = None
    real = os.path.realpath(directory)
    if Path(name).expanduser().is_dir():
        name = real
        relative = None if run is None else os.path.relpath(real, os.path.realpath(run))
    note = f"{xxhash.xxh3_128(os.fsencode(real)).hexdigest()}.json"
    notes = None if cache is None else cache / "base-digests"
    known = {} if notes is None else read_note(notes, note)

    def entry_of(file: str) -> list[Any]:
        # Resolved: in the Hub's cache these files are links, which file_record does not follow.
        path = Path(os.path.realpath(directory / file))
        # Before the file is read: one that changes meanwhile has another stamp at the next start.
        stamp = _stamp(path)
        entry = known.get(file)
        if isinstance(entry, list) and entry[:-1] == stamp:
            return entry
        return [*stamp, file_record(path).digest]

    try:
        names = _weight_files(directory)
        with ThreadPoolExecutor(_NUM_THREADS, "base") as executor:
            entries = dict(zip(names, executor.map(entry_of, names), strict=True))
    except OSError as error:
        hint = "download the base model again"
        problem = os_problem(error, "a file of the base model cannot be read", hint=hint)
        raise RecipeError.all_of([problem]) from error
    if entries != known and notes is not None:
        # Without the note, the next start reads the base again.
        with suppress(OSError):
            notes.mkdir(parents=True, exist_ok=True)
            write_note(notes / note, entries)
    files = {file: FileRecord(entry[0], str(entry[-1])) for file, entry in entries.items()}
    return BaseIdentity(name, relative, files)


def _weight_files(directory: Path) -> list[str]:
    """Return config.json and the files from which transformers reads the weights. Raises :class:`RecipeError`."""
    for single in _SINGLES:
        index = f"{single}.index.json"
        if files := files_of_index(directory / index):
            return ["config.json", index, *files]
        if (directory / single).is_file():
            return ["config.json", single]
    raise RecipeError(
        "the base model has no weights",
        where="model.from_pretrained",
        value=str(directory),
        hint="name a directory with model.safetensors, or with its index and files",
    )


def files_of_index(index: Path) -> list[str]:
    """Return the names of the base model's weight files, sorted, from its *index*; none without one, or if it is not
    used. Raises :class:`RecipeError` if the index is not valid.
    """
    weight_map = read_weight_map(index, follow_links=True, kind=RecipeError)
    return sorted(set((weight_map or {}).values()))


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    # A program can set mtime back, but not ctime.
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
