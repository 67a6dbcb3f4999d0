"""Local data files: which ones a path selects, and their formats.

A file is ``.jsonl`` (or ``.ndjson``), ``.json``, ``.parquet``, ``.arrow``, ``.csv``, ``.tsv``, or ``.txt`` with a
document on each line; behind ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` it is compressed. For what the files contain, see
:mod:`.row_files`.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.errors import RecipeError

NO_STREAM = "set dataset.streaming false"
_SKIPPED_BYTES = 1 << 20


def _open_zstd(path: Path) -> IO[bytes]:
    """Open a file for reading its decompressed bytes, from the beginning only. An OSError of damage has no errno."""
    # Python has no module for Zstandard before 3.14. Imported here because it takes a fraction of a second.
    import pyarrow  # type: ignore[import-untyped]

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


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
"""Errors of reading a damaged file. Those without an errno come from decompressing it."""
_COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
_BESIDE_DATA = {
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
_REMOTE = re.compile(r"\w+:/")


def is_pattern(path: str) -> bool:
    """Whether *path* is a pattern: it contains wildcards, and no file has this name."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def files_of(paths: Sequence[str]) -> list[Path]:
    """List the files of *paths*, which are names or patterns: in the given order, and sorted within a pattern.

    Raises :class:`RecipeError` for no file, an unreadable file, files of several formats, and a repeated file.
    """
    files = []
    for path in paths:
        files += [require_readable(file) for file in _matching(path)]
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        raise RecipeError(
            "data files of different formats cannot be combined",
            where="dataset.path",
            value=", ".join(f"*{kind}" for kind in kinds),
            hint="",
        )
    # By real path: a pattern may match a file and a link to it.
    real_paths = Counter(os.path.realpath(file) for file in files)
    [(name, count)] = real_paths.most_common(1)
    if count > 1:
        raise RecipeError(
            "a data file is listed twice",
            where="dataset.path",
            value=name,
            hint="",
        )
    return files


def _matching(path: str) -> list[Path]:
    expanded = os.path.expanduser(path)
    # A URL may contain ? as well. require_readable rejects it with its own hint.
    if not is_pattern(path) or _REMOTE.match(path):
        return [Path(expanded)]
    files = [Path(name) for name in sorted(glob.glob(expanded, recursive=True))]
    files = [file for file in files if file.is_file()]
    if not files:
        what = "no data file matches this pattern"
        raise RecipeError(what, where="dataset.path", value=path, hint=_path_hint())
    return files


def digest(path: Path) -> str:
    """Return a digest of a file's format and content."""
    # With the format, because the same bytes are other rows in another format.
    with path.open("rb") as file:
        return kind_of(path) + hashlib.file_digest(file, "blake2b").hexdigest()


def kind_of(path: Path) -> str:
    """Return the suffix that determines a file's format, in lower case; of ``a.csv.gz`` it is ``.csv``."""
    if path.suffix.lower() in _COMPRESSED:
        path = path.with_suffix("")
    kind = path.suffix.lower()
    return ".jsonl" if kind == ".ndjson" else kind


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed according to its suffix.

    Raises :class:`RecipeError` if a compressed file is damaged, also for reading it in the block.
    """
    decompress = _COMPRESSED.get(path.suffix.lower())
    try:
        with path.open("rb") if decompress is None else decompress(path) as file:
            yield file
    except UNREADABLE as error:
        # An OSError with a number is one of the system.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        hint = "download or compress it again, and check that its suffix matches its compression"
        raise RecipeError(
            "a compressed file is damaged", where=str(path), value=error, hint=hint
        ) from error


def advance(file: IO[bytes], position: int, offset: int) -> None:
    """Read on from *position* to *offset*; in a compressed file, this decompresses what is between."""
    if file.seekable():
        file.seek(offset)
        return
    while position < offset and (skipped := file.read(min(_SKIPPED_BYTES, offset - position))):
        position += len(skipped)


def is_about_data(path: Path) -> bool:
    """Whether a file is hidden, or one that ``datasets`` writes in addition to data."""
    return path.name in _BESIDE_DATA or path.name.startswith(".")


def saved_table(directory: Path) -> list[Path] | None:
    """List the files that ``Dataset.save_to_disk`` of ``datasets`` wrote, in order; None for other directories."""
    state = directory / "state.json"
    if not (state.is_file() and (directory / "dataset_info.json").is_file()):
        return None
    parts = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
    return [directory / part["filename"] for part in parts]


def _path_hint() -> str:
    return (
        f"check dataset.path; relative paths start at the working directory, {Path.cwd()}; only local files and data "
        "sets of the Hub can be read"
    )


def require_readable(path: Path) -> Path:
    """Return *path*. Raises :class:`RecipeError` if its format is unknown or it cannot be read."""
    try:
        if path.exists():
            what = hint = ""
            if kind_of(path) not in LOADERS:
                what = "unknown data file format"
                known = ", ".join("*" + kind for kind in LOADERS)
                hint = f"use a file named {known} (also {', '.join(_COMPRESSED)} behind it), a directory, or a Hub name"
            # Opening a named pipe would wait for a writer, and its content could not be read again.
            elif not (path.is_file() or path.is_dir()):
                what = "a data file is not a regular file"
                hint = "copy its content to a file: data is read again in each epoch and after a resume"
            if what:
                raise RecipeError(what, where="dataset.path", value=path, hint=hint)
        path.open("rb").close()
    except OSError as error:
        raise RecipeError.of_system(
            error, "a data file cannot be read", hint=_path_hint()
        ) from error
    return path
