"""Rows of a local data file, of a directory of them, or of a data set of the Hugging Face Hub.

Read by the ``datasets`` library. A file is ``.jsonl``, ``.json``, ``.parquet``, ``.csv`` (whose values are texts all),
or ``.txt`` with a document on each line; behind ``.gz`` it is compressed.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from automodel_ckpt.errors import RecipeError, os_problem

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Rows:
    """A table of samples to be: columns of values, each row with a place that messages name."""

    path: str

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        raise NotImplementedError

    @property
    def fields(self) -> Sequence[str]:
        raise NotImplementedError

    def values(self, field: str) -> list[Any]:
        """A column, which is there."""
        raise NotImplementedError

    def place(self, row: int) -> str:
        """Where a row stands."""
        raise NotImplementedError

    def columns(self, fields: Sequence[str]) -> list[list[Any]]:
        """The values of each field, row by row; :class:`RecipeError` for no rows, or no such field."""
        self.require(fields)
        return [self.values(field) for field in fields]

    def require(self, fields: Sequence[str]) -> None:
        """:class:`RecipeError` for no rows, or no such field."""
        if self.num_rows == 0:
            raise _empty(self.path)
        if missing := [field for field in fields if field not in self.fields]:
            raise RecipeError(
                f"the data has no field {', '.join(missing)}",
                where=self.path,
                value=f"its fields are {', '.join(self.fields)}",
                remedy="name the fields to use in the dataset section, or rename those of the data",
            )

    def texts(self, fields: Sequence[str]) -> list[list[str]]:
        """:meth:`columns` of texts; :class:`RecipeError` with the row for a value that is no text."""
        columns = self.columns(fields)
        for field, values in zip(fields, columns, strict=True):
            self._require_texts(field, values)
        return columns

    def has_field(self, field: str) -> bool:
        """Whether the rows have this field."""
        return field in self.fields

    def _require_texts(self, field: str, values: list[Any]) -> None:
        for row, value in enumerate(values):
            if not isinstance(value, str):
                what = f"field {field} of a sample is {'missing' if value is None else 'not a text'}"
                remedy = "correct or leave out this sample"
                raise RecipeError(what, where=self.place(row), value=value, remedy=remedy)


@dataclass(frozen=True)
class OneRow(Rows):
    """The row *number* of a stream as a table of its own."""

    path: str
    number: int
    content: Mapping[str, Any]

    @property
    def num_rows(self) -> int:
        return 1

    @property
    def fields(self) -> Sequence[str]:
        return list(self.content)

    def values(self, field: str) -> list[Any]:
        return [self.content[field]]

    def place(self, row: int) -> str:
        return f"{self.path}, row {self.number}"


@dataclass(frozen=True)
class Source(Rows):
    """Where rows come from: *path* is a file, a directory, or a Hub name; *name* the subset of the latter two.

    *split* is as ``datasets`` has it, ``train[:90%]`` included. The rows of a file are its split ``train``.
    """

    path: str
    name: str | None = None
    split: str = "train"

    @property
    def is_file(self) -> bool:
        """Whether *path* means one local file, there or not; a directory or Hub name otherwise."""
        path = Path(self.path).expanduser()
        is_named = os.path.isdir(path) or _HUB_NAME.fullmatch(self.path)
        return _kind(path) in _LOADERS or os.path.isfile(path) or not is_named

    def fingerprint(self) -> str:
        """Changes with the rows. :class:`RecipeError` when they cannot be had."""
        if not self.is_file:
            return f"{self.path} {self.name} {self.split} {self._table._fingerprint}"
        self._refuse_subset_of_file()
        return f"{_digest(self._file)} {self.split}"

    def stream(self) -> Any:
        """The rows as an iterable data set of ``datasets``, read while they are used; :class:`RecipeError` likewise."""
        import datasets  # type: ignore[import-untyped]

        if "[" in self.split:
            remedy = "leave the part out, or set dataset.streaming false"
            raise RecipeError("a stream has no parts of splits", where="dataset.split", value=self.split, remedy=remedy)
        try:
            if not self.is_file:
                return datasets.load_dataset(self._named, self.name, split=self.split, streaming=True)
            if not self._holds_anything():
                raise _empty(self.path)
            with _quiet(datasets):
                return datasets.load_dataset(**self._of_file(datasets), split=self.split, streaming=True)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self._bad_line() or self._refused(error) from error

    @property
    def num_rows(self) -> int:
        return int(self._table.num_rows)

    @property
    def fields(self) -> Sequence[str]:
        return list(self._table.column_names)

    def values(self, field: str) -> list[Any]:
        try:
            return list(self._table[field])
        except UnicodeDecodeError as error:  # the reader of JSON takes any bytes for UTF-8
            raise unreadable(self._file, error) from error

    def row(self, number: int) -> dict[str, Any]:
        """The fields of one row; its images are decoded only now. :class:`RecipeError` where they cannot be."""
        try:
            fields: dict[str, Any] = self._table[number]
            return fields
        except (OSError, ValueError, SyntaxError) as error:
            value = f"{type(error).__name__}: {error}"
            remedy = "correct or leave out this sample"
            raise RecipeError("a row cannot be read", where=self.place(number), value=value, remedy=remedy) from error

    def place(self, row: int) -> str:
        """File and line of a row where rows are lines, else its number from 0."""
        if self.is_file and _kind(self._file) == ".jsonl" and self.split == "train":
            for index, (number, _) in enumerate(_lines(self._file)):
                if index == row:
                    return f"{self.path}:{number}"
        split = "" if self.split == "train" else f" {self.split}"
        return f"{self.path}{split}, row {row}"

    def _holds_anything(self) -> bool:
        """Whether there is more than blank lines in the file; :class:`RecipeError` where that cannot be seen."""
        self._refuse_subset_of_file()
        file = _require_readable(self._file)
        return not _is_table_without_rows(file) and next(_lines(file), None) is not None

    def _refuse_subset_of_file(self) -> None:
        if self.name is not None:
            remedy = "leave name out: it chooses a subset of a directory or of a data set of the Hub"
            raise RecipeError("a data file has no subsets", where="dataset.name", value=self.name, remedy=remedy)

    @property
    def _file(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def _named(self) -> str:
        """A Hub name as it is; a directory in full, since ``datasets`` needs a name for it."""
        path = Path(self.path).expanduser()
        return str(path.resolve() if path.is_dir() else path)

    @cached_property
    def _table(self) -> Any:
        # Imported here because it takes half a second and is not needed when the samples of a file are prepared.
        import datasets

        with _quiet(datasets):
            return self._read_file(datasets) if self.is_file else self._read_named(datasets)

    def _read_file(self, datasets: Any) -> Any:
        from pyarrow import ArrowInvalid  # type: ignore[import-untyped]

        if not self._holds_anything():
            return datasets.Dataset.from_dict({})
        with TemporaryDirectory() as scratch:
            try:
                return datasets.load_dataset(
                    **self._of_file(datasets), split=self.split, cache_dir=scratch, keep_in_memory=True
                )
            except (datasets.exceptions.DatasetGenerationError, ArrowInvalid) as error:
                raise unreadable(self._file, error) from error
            except ValueError as error:
                raise self._bad_line() or self._refused(error) from error

    def _of_file(self, datasets: Any) -> dict[str, Any]:
        """What ``load_dataset`` is given to read the file."""
        options = {"path": _LOADERS[_kind(self._file)], "data_files": str(self._file)}
        return options | _as_texts(self._file, datasets) if _kind(self._file) == ".csv" else options

    def _bad_line(self) -> RecipeError | None:
        """What is wrong with a line of the file, or of the files of a directory; None where that is not it."""
        path = self._file
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        return next(filter(None, map(bad_line, files)), None)

    def _read_named(self, datasets: Any) -> Any:
        try:
            return datasets.load_dataset(self._named, self.name, split=self.split)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self._bad_line() or self._refused(error) from error

    def _refused(self, error: Exception) -> RecipeError:
        reason = error.__cause__ or error if type(error).__name__ == "DatasetGenerationError" else error
        lines = str(reason).splitlines() or [type(reason).__name__]
        return RecipeError(
            "the data set cannot be read",
            where="dataset.path, dataset.name, dataset.split",
            value=f"{self.path}, {self.name}, {self.split} ({lines[0]})",
            remedy="correct them; a Hub name needs the network or a filled cache, "
            f"a relative path starts from {Path.cwd()}",
        )


def _digest(path: Path) -> str:
    """Of the content; :class:`RecipeError` when there is no such file or it is of no known kind."""
    with _require_readable(path).open("rb") as file:
        return _kind(path) + hashlib.file_digest(file, "blake2b").hexdigest()


def _kind(path: Path) -> str:
    """The suffix that says how a file is read: in small letters, of a compressed file the one before ``.gz``."""
    return (path.with_suffix("") if _is_compressed(path) else path).suffix.lower()


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if _is_compressed(path) else path.open("rb")  # type: ignore[return-value]


def _is_table_without_rows(path: Path) -> bool:
    if _kind(path) != ".parquet":
        return False
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        return bool(ParquetFile(path).metadata.num_rows == 0)
    except ArrowInvalid:  # the reader will say why
        return False


def _as_texts(path: Path, datasets: Any) -> dict[str, Any]:
    """Options for a table in which ``3`` and ``NA`` are texts as well, and only an empty place is none."""
    options = {"keep_default_na": False, "na_values": [""]}
    try:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as text:
            names = next(filter(None, csv.reader(text)), [])
    except (UnicodeDecodeError, csv.Error):  # told by the reader
        return options
    if len(set(names)) < len(names) or "" in names:  # which pandas would rename
        return options
    return options | {"features": datasets.Features({name: datasets.Value("string") for name in names})}


def _require_readable(path: Path) -> Path:
    if _kind(path) not in _LOADERS:
        remedy = f"use a file named {', '.join('*' + known for known in _LOADERS)}, a directory or a Hub name"
        raise RecipeError("the kind of a data file is not known", where="dataset.path", value=path, remedy=remedy)
    try:
        path.open("rb").close()
    except OSError as error:
        remedy = f"check dataset.path; a relative one starts from the working directory, {Path.cwd()}"
        if re.match(r"\w+:/", str(path)):
            remedy = "copy the file here: only files of this machine and data sets of the Hub are read"
        elif set("*?[") & set(str(path)):
            remedy = "name one file, or a directory for all files in it: patterns are not followed"
        raise RecipeError.all_of([os_problem(error, "a data file cannot be read", remedy=remedy)]) from error
    return path


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without progress bars, and without log lines of what is told by an exception as well."""
    shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def _empty(path: str) -> RecipeError:
    remedy = "give a file with at least one sample"
    return RecipeError("the data file is empty", where=path, value="0 samples", remedy=remedy)


def unreadable(path: Path, error: Exception) -> RecipeError:
    """The line that cannot be read, found by reading again; otherwise the reader's own words."""
    remedy = "repair the file; every row must have the same fields with values of the same types"
    reason = str(error.__cause__ or error).strip()
    return bad_line(path) or RecipeError("the data file cannot be read", where=str(path), value=reason, remedy=remedy)


def bad_line(path: Path) -> RecipeError | None:
    """The first line of a file that is no text, or of JSONL no object; None where there is none."""
    if _kind(path) not in _LOADERS or _kind(path) == ".parquet":
        return None
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as fault:
            value = f"byte {line[fault.start]:#04x} at {fault.start} of the line"
            remedy = "save the file as UTF-8"
            return RecipeError("a line is not UTF-8 text", where=where, value=value, remedy=remedy)
        if _kind(path) == ".jsonl" and (fault_of_json := _fault(text)):
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


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, numbered from 1."""
    with _open(path) as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
