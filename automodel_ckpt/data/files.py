"""Local data files: which ones a path selects, and their formats.

A file is ``.jsonl`` (or ``.ndjson``), ``.json``, ``.parquet``, ``.arrow``, ``.csv``, ``.tsv``, or ``.txt`` with a
document on each line; behind ``.gz``, ``.bz2`` or ``.xz`` it is compressed. For what the files contain, see
:mod:`.row_files`.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.errors import RecipeError, os_problem

LOADERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
"""Suffix -> the builder of ``datasets`` that reads it."""
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises; without an errno it is of what a compressed one holds."""
_COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_BESIDE_DATA = {
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
_TABLES = (".parquet", ".arrow")
"""Kinds without lines."""
_REMOTE = re.compile(r"\w+:/")


def is_pattern(path: str) -> bool:
    """Whether *path* means the files that match it: it has wildcards, and is no file itself."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def files_of(paths: Sequence[str]) -> list[Path]:
    """The files that *paths*, names or patterns, mean: in the order given, those of a pattern sorted.

    Raises :class:`RecipeError` for none, for one that cannot be read, for several kinds, and for one that comes twice.
    """
    files = [require_readable(file) for path in paths for file in _matching(path)]
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        raise RecipeError(
            "data files of different formats cannot be combined",
            where="dataset.path",
            value=", ".join(f"*{kind}" for kind in kinds),
            hint="use files of one format, for example data/*.jsonl",
        )
    [(name, count)] = Counter(os.path.realpath(file) for file in files).most_common(1)
    if count > 1:
        hint = "list each file once; otherwise its samples are trained on twice in each epoch"
        raise RecipeError(
            "a data file is listed twice", where="dataset.path", value=name, hint=hint
        )
    return files


def _matching(path: str) -> list[Path]:
    expanded = os.path.expanduser(path)
    if not is_pattern(path) or _REMOTE.match(path):
        return [Path(expanded)]
    found = sorted(name for name in glob.glob(expanded, recursive=True) if os.path.isfile(name))
    if not found:
        hint = f"check dataset.path; relative paths start at the working directory, {Path.cwd()}"
        raise RecipeError(
            "no data file matches this pattern", where="dataset.path", value=path, hint=hint
        )
    return [Path(name) for name in found]


def digest(path: Path) -> str:
    """A digest of a file's format and content."""
    with path.open("rb") as file:
        return kind_of(path) + hashlib.file_digest(file, "blake2b").hexdigest()


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read: in small letters, of a compressed file the one before ``.gz``."""
    kind = (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()
    return ".jsonl" if kind == ".ndjson" else kind


def open_data(path: Path) -> IO[bytes]:
    """A file opened for reading bytes, decompressed by its suffix."""
    opened: IO[bytes] = _COMPRESSED.get(path.suffix.lower(), _plainly)(path)
    return opened


def _plainly(path: Path) -> IO[bytes]:
    return path.open("rb")


def holds_anything(path: Path) -> bool:
    """Whether there is more than blank lines in a file, or a row in a table."""
    return not _is_table_without_rows(path) and next(lines_of(path), None) is not None


def _is_table_without_rows(path: Path) -> bool:
    if kind_of(path) != ".parquet":
        return False
    from pyarrow import ArrowInvalid  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        return bool(ParquetFile(path).metadata.num_rows == 0)
    except ArrowInvalid:  # the reader will say why
        return False


def is_about_data(path: Path) -> bool:
    """Whether a file is one that ``datasets`` writes beside data, or hidden."""
    return path.name in _BESIDE_DATA or path.name.startswith(".")


def saved_table(directory: Path) -> list[Path] | None:
    """The files, in their order, of what ``Dataset.save_to_disk`` of ``datasets`` wrote; None for other directories."""
    state = directory / "state.json"
    if not (state.is_file() and (directory / "dataset_info.json").is_file()):
        return None
    return [
        directory / part["filename"]
        for part in json.loads(state.read_text(encoding="utf-8"))["_data_files"]
    ]


def require_readable(path: Path) -> Path:
    """*path*, if it is a file of a known kind that can be read; else :class:`RecipeError`."""
    if kind_of(path) not in LOADERS:
        hint = f"use a file named {', '.join('*' + known for known in LOADERS)}, a directory, or a Hub name"
        raise RecipeError("unknown data file format", where="dataset.path", value=path, hint=hint)
    try:
        path.open("rb").close()
    except OSError as error:
        hint = f"check dataset.path; relative paths start at the working directory, {Path.cwd()}"
        if _REMOTE.match(str(path)):
            hint = "copy the file to a local disk: only local files and data sets of the Hub can be read"
        raise RecipeError.all_of(
            [os_problem(error, "a data file cannot be read", hint=hint)]
        ) from error
    return path


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, numbered from 1; :class:`RecipeError` for a compressed file that is damaged."""
    try:
        with open_data(path) as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except UNREADABLE as error:
        if not is_damage(error):
            raise
        raise damaged(path, error) from error


def is_damage(error: Exception) -> bool:
    """Whether reading failed because of what a compressed file contains, rather than by an error of the system."""
    if isinstance(error, OSError):
        return error.errno is None
    return isinstance(error, UNREADABLE)


def damaged(path: Path, error: Exception) -> RecipeError:
    """The error for a compressed file that cannot be decompressed."""
    hint = "download or compress it again, and check that its suffix matches its compression"
    return RecipeError("a compressed file is damaged", where=str(path), value=error, hint=hint)
