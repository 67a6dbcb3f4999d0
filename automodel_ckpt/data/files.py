"""Local data files: which ones a path means, of which kind they are, and the line at which one cannot be read.

A file is ``.jsonl`` (or ``.ndjson``), ``.json``, ``.parquet``, ``.arrow``, ``.csv`` or ``.tsv`` (whose values are texts
all), or ``.txt`` with a document on each line; behind ``.gz``, ``.bz2`` or ``.xz`` it is compressed.
"""

from __future__ import annotations

import bz2
import csv
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
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.errors import RecipeError, os_problem

LOADERS = {
    ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv",
    ".txt": "text",
}  # fmt: skip
"""Suffix -> the builder of ``datasets`` that reads it."""
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises; without an errno it is of what a compressed one holds."""
_COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_BESIDE_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
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
            "data files of several kinds cannot be read as one",
            where="dataset.path",
            value=", ".join(f"*{kind}" for kind in kinds),
            remedy="name files of one kind, as data/*.jsonl",
        )
    [(name, count)] = Counter(os.path.realpath(file) for file in files).most_common(1)
    if count > 1:
        remedy = "name each file once; its samples would be trained on twice in each epoch"
        raise RecipeError("a data file is named twice", where="dataset.path", value=name, remedy=remedy)
    return files


def _matching(path: str) -> list[Path]:
    expanded = os.path.expanduser(path)
    if not is_pattern(path) or _REMOTE.match(path):
        return [Path(expanded)]
    found = sorted(name for name in glob.glob(expanded, recursive=True) if os.path.isfile(name))
    if not found:
        remedy = f"check dataset.path; a relative one starts from the working directory, {Path.cwd()}"
        raise RecipeError("no data file has such a name", where="dataset.path", value=path, remedy=remedy)
    return [Path(name) for name in found]


def digest(path: Path) -> str:
    """Of a file's content and kind."""
    with path.open("rb") as file:
        return kind_of(path) + hashlib.file_digest(file, "blake2b").hexdigest()


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read: in small letters, of a compressed file the one before ``.gz``."""
    kind = (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()
    return ".jsonl" if kind == ".ndjson" else kind


def _open(path: Path) -> IO[bytes]:
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


def reading_options(files: Sequence[Path], datasets: Any) -> dict[str, Any]:
    """What the reader of ``datasets`` needs to be told for *files*, of which it reads all alike."""
    kinds = {kind_of(file) for file in files}
    if kinds in ({".csv"}, {".tsv"}):
        return _as_texts(files[0], datasets)
    return {"encoding": "utf-8-sig"} if kinds == {".txt"} else {}  # or a byte order mark would be learnt


def _as_texts(path: Path, datasets: Any) -> dict[str, Any]:
    """Options for a table in which ``3`` and ``NA`` are texts as well, and only an empty place is none.

    :class:`RecipeError` for a first row of more values than there are names: readers would move all to the right.
    """
    separator = "\t" if kind_of(path) == ".tsv" else ","
    options = {"sep": separator, "keep_default_na": False, "na_values": [""]}
    try:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as text:
            rows = filter(None, csv.reader(text, delimiter=separator))
            names, first = next(rows, []), next(rows, [])
    except (UnicodeDecodeError, csv.Error):  # told by the reader
        return options
    if len(first) > len(names):
        raise RecipeError(
            "a row has more values than the table has columns",
            where=f"{path}, row 0",
            value=f"{len(first)} values for {', '.join(names)}",
            remedy="put quotes around values with separators in them, or name all columns in the first line",
        )
    if len(set(names)) < len(names) or "" in names:  # which pandas would rename
        return options
    return options | {"features": datasets.Features({name: datasets.Value("string") for name in names})}


def is_about_data(path: Path) -> bool:
    """Whether a file is one that ``datasets`` writes beside data, or hidden."""
    return path.name in _BESIDE_DATA or path.name.startswith(".")


def saved_table(directory: Path) -> list[Path] | None:
    """The files, in their order, of what ``Dataset.save_to_disk`` of ``datasets`` wrote; None for other directories."""
    state = directory / "state.json"
    if not (state.is_file() and (directory / "dataset_info.json").is_file()):
        return None
    return [directory / part["filename"] for part in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]


def require_readable(path: Path) -> Path:
    """*path*, if it is a file of a known kind that can be read; else :class:`RecipeError`."""
    if kind_of(path) not in LOADERS:
        remedy = f"use a file named {', '.join('*' + known for known in LOADERS)}, a directory or a Hub name"
        raise RecipeError("the kind of a data file is not known", where="dataset.path", value=path, remedy=remedy)
    try:
        path.open("rb").close()
    except OSError as error:
        remedy = f"check dataset.path; a relative one starts from the working directory, {Path.cwd()}"
        if _REMOTE.match(str(path)):
            remedy = "copy the file here: only files of this machine and data sets of the Hub are read"
        raise RecipeError.all_of([os_problem(error, "a data file cannot be read", remedy=remedy)]) from error
    return path


def bad_line(path: Path) -> RecipeError | None:
    """The first line of a file that is no text, or of JSONL no object; None where there is none."""
    if kind_of(path) not in LOADERS or kind_of(path) in _TABLES:
        return None
    for number, line in lines_of(path):
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as fault:
            value = f"byte {line[fault.start]:#04x} at {fault.start} of the line"
            remedy = "save the file as UTF-8"
            return RecipeError("a line is not UTF-8 text", where=where, value=value, remedy=remedy)
        if kind_of(path) == ".jsonl" and (fault_of_json := _fault(text)):
            remedy = "correct or leave out this line"
            return RecipeError("a line is not JSON", where=where, value=fault_of_json, remedy=remedy)
    return None


def _fault(text: str) -> str:
    """Why a line is no JSON object that readers take; empty where it is one."""
    try:
        row = json.loads(text.rstrip(), object_pairs_hook=_named_once)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, as \\ud800 is"
    except (ValueError, RecursionError) as fault:
        return str(fault)
    return "" if isinstance(row, dict | None) else f"no object with fields, but {text.strip()[:40]}"


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"a field stands there twice, among {', '.join(name for name, _ in pairs)}")
    return row


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, numbered from 1; :class:`RecipeError` for a compressed file that is damaged."""
    try:
        with _open(path) as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno:
            raise
        remedy = "get it anew or compress it again, and check that the end of its name says how it is compressed"
        raise RecipeError("a compressed file is damaged", where=str(path), value=error, remedy=remedy) from error
