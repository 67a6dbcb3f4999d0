"""Rows of local data files, of a directory of them, or of a data set of the Hugging Face Hub.

JSON, CSV, TSV and text files are read by :mod:`.row_files`. Parquet, Arrow and the Hub are read by ``datasets``; so are
directories with a README that gives options for reading.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from automodel_ckpt.base.durable_io import walk
from automodel_ckpt.base.hub_access import check_access, explained, is_hub_name
from automodel_ckpt.data.rows.files import (
    LOADERS,
    NO_STREAM,
    UNREADABLE,
    digest,
    files_of,
    is_about_data,
    is_pattern,
    kind_of,
    saved_table,
)
from automodel_ckpt.data.rows.row_files import KINDS, RecordStream
from automodel_ckpt.data.rows.rows import (
    Columns,
    RecordRows,
    Row,
    Rows,
    empty_data,
)
from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.data.rows.datasets_library import TableRows, TableStream

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source(Rows):
    """The source of rows: *path* is a file, a directory or a Hub name, *name* a subset of a directory or Hub data set.

    *split* follows the syntax of ``datasets``, such as ``train[:90%]``; *revision* is a branch, tag or commit of a Hub
    data set. Files have only the split ``train``. For
    patterns and lists of files, use :meth:`of`.
    """

    path: str
    name: str | None = None
    split: str = "train"
    several: tuple[str, ...] = ()
    revision: str | None = None

    @classmethod
    def of(
        cls,
        path: str | Sequence[str],
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
    ) -> Source:
        """Make a source of a path, a pattern such as ``data/*.jsonl``, or a list of them.

        The rows of several files are concatenated in their order. Raises :class:`RecipeError` for an empty list or
        an empty path.
        """
        paths = [path] if isinstance(path, str) else list(path)
        if not paths or "" in paths:
            hint = "name a file, a directory or a data set of the Hub; . is the working directory"
            raise RecipeError("the path is empty", where="dataset.path", value=path, hint=hint)
        if isinstance(path, str):
            several = (path,) if is_pattern(path) else ()
            return cls(path, name, split, several, revision)
        shown = ", ".join(paths) if len(paths) < 3 else f"{paths[0]} and {len(paths) - 1} more"
        return cls(shown, name, split, tuple(paths), revision)

    @property
    def is_file(self) -> bool:
        """Whether *path* is one or several local files, existing or not, rather than a directory or Hub name."""
        path = Path(self.path).expanduser()
        if self.several or kind_of(path) in LOADERS or os.path.isfile(path):
            return True
        return not (os.path.isdir(path) or _HUB_NAME.fullmatch(self.path))

    @cached_property
    def files(self) -> list[Path]:
        """The files of the source if :attr:`is_file`. Raises :class:`RecipeError` if they cannot be read."""
        # First: a misspelled path of a directory is no file with splits that matter.
        files = files_of(self.several or [self.path])
        if self.name is not None or self.revision is not None or self._split_names() != ["train"]:
            raise RecipeError(
                "a data file has only the split train, no subsets and no revision",
                where="dataset.split, dataset.name, dataset.revision",
                value=f"{self.split}, {self.name}, {self.revision} ({self.path})",
                hint="remove these keys, or select a part of the file: dataset.split train[:90%]",
            )
        return files

    @property
    def folder(self) -> Path:
        """The directory that relative paths in the data start at. Raises :class:`RecipeError` for several ones."""
        if not self.is_file:
            return Path(self.path).expanduser()
        folders = sorted({file.parent for file in self.files})
        if len(folders) > 1:
            raise RecipeError(
                "data files that contain relative paths are in several directories",
                where="dataset.path",
                value=", ".join(map(str, folders[:3])),
                hint="",
            )
        return folders[0]

    def fingerprint(self) -> str:
        """A text that changes with the content of the rows. Raises :class:`RecipeError` if they cannot be read."""
        if not self.is_file and self._record_files is None:
            return f"{self.path} {self.name} {self.split} {self._table.table._fingerprint}"
        # Checkpoints contain a digest of this text: another form would report that the data has changed.
        if self.is_file:
            return f"{' '.join(map(digest, self.files))} {self.split}"
        files = chain.from_iterable(self._files_of_splits.values())
        return f"{self.path} {self.name} {self.split} {' '.join(map(digest, files))}"

    def files_signature(self) -> str:
        """Return a text that changes if files are added, removed, or change their size. Does not read them."""
        parts = [self.path]
        if self.is_file:
            parts = [f"{file.name} {file.stat().st_size}" for file in self.files]
        if self.revision is not None:
            parts.append(self.revision)
        return f"{', '.join(parts)} {self.name} {self.split}"

    def stream(self) -> RecordStream | TableStream:
        """The rows as a stream, read during training. Raises :class:`RecipeError` for no or unreadable rows."""
        if "[" in self.split or "+" in self.split:
            raise RecipeError(
                "a stream cannot read part of a split",
                where="dataset.split",
                value=self.split,
                hint=NO_STREAM,
            )
        if self._record_files is not None:
            [files] = self._files_of_splits.values()
            stream = RecordStream(files)
            if stream.is_empty:
                raise empty_data(self.path)
            return stream
        import datasets  # type: ignore[import-untyped]

        from automodel_ckpt.data.rows.datasets_library import TableStream

        with self._reading():
            given = self._arguments()
            rows = datasets.load_dataset(**given, split=self.split, streaming=True)
        self._report_others(rows.info.builder_name)
        return TableStream(self, rows)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Hide the output of ``datasets``, and raise its errors as :class:`RecipeError`."""
        import datasets

        from automodel_ckpt.data.rows.datasets_library import quiet

        try:
            with quiet(datasets):
                yield
        except (*UNREADABLE, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self.unreadable(error) from error

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def fields(self) -> Sequence[str]:
        return self._rows.fields

    def class_names(self, field: str) -> Sequence[str] | None:
        return self._rows.class_names(field)

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        return self._rows.read_range(fields, start, stop)

    def row(self, number: int) -> Row:
        """The fields of one row. Raises :class:`RecipeError` if it cannot be read."""
        return self._rows.row(number)

    def place(self, row: int) -> str:
        """The location of a row: file and line, or for tables without lines the number of the row from 0."""
        return self._rows.place(row)

    @cached_property
    def _record_files(self) -> dict[str, list[Path]] | None:
        """The files of each split if :mod:`.row_files` reads them. None when ``datasets`` does."""
        if self.is_file:
            return {"train": self.files} if kind_of(self.files[0]) in KINDS else None
        directory = Path(self.path).expanduser()
        if not directory.is_dir() or saved_table(directory) is not None:
            return None
        import datasets

        from automodel_ckpt.data.rows.datasets_library import class_names, has_reading_options

        with self._reading():
            # datasets assigns the files to splits, as on the Hub. This reads no row.
            builder = datasets.load_dataset_builder(**self._arguments())
        reader = builder.info.builder_name
        splits: dict[str, list[Path]] = {}
        kinds: set[str] = set()
        for split, names in (builder.config.data_files or {}).items():
            files = [Path(name) for name in names]
            splits[str(split)] = [file for file in files if LOADERS.get(kind_of(file)) == reader]
            kinds.update(kind_of(file) for file in splits[str(split)])
        if not kinds or not kinds <= KINDS or has_reading_options(builder.config, kinds):
            return None
        if any(map(class_names, (builder.info.features or {}).values())):
            return None
        self._report_others(reader)
        return splits

    @cached_property
    def _rows(self) -> RecordRows | TableRows:
        """The rows, read by :mod:`.row_files` or by ``datasets``."""
        if self._record_files is None:
            return self._table
        splits = self._files_of_splits
        rows = RecordRows(self.path, list(chain.from_iterable(splits.values())))
        if self.split in splits:
            return rows
        import datasets

        # The rows of the files of a split follow each other.
        firsts, sizes, num_files = {}, {}, 0
        for name, files in splits.items():
            firsts[name] = rows.file_ends[num_files]
            num_files += len(files)
            sizes[name] = rows.file_ends[num_files] - firsts[name]
        try:
            parts = datasets.ReadInstruction.from_spec(self.split).to_absolute(sizes)
        except (ValueError, AssertionError) as error:
            raise self.unreadable(error) from error
        rows.numbers = array("q")
        for part in parts:
            first = firsts[part.splitname]
            rows.numbers.extend(range(first + part.from_, first + part.to))
        return rows

    def _split_names(self) -> list[str]:
        """The names of splits in :attr:`split`, such as ``train[:90%]+test``, known or not."""
        parts = self.split.split("+")
        return list(dict.fromkeys(part.partition("[")[0].strip() for part in parts))

    @property
    def _files_of_splits(self) -> dict[str, list[Path]]:
        """The files of the splits in :attr:`split`. Raises :class:`RecipeError` for unknown ones."""
        known = self._record_files or {}
        names = self._split_names()
        for name in names:
            if name not in known:
                error = ValueError(f'Unknown split "{name}". Should be one of {list(known)}.')
                raise self.unreadable(error)
        return {name: known[name] for name in names}

    def _arguments(self) -> Row:
        """The arguments of ``load_dataset``."""
        if self.is_file:
            return {"path": LOADERS[kind_of(self.files[0])], "data_files": _escaped(self.files)}
        path = Path(self.path).expanduser()
        if not path.is_dir():
            if is_hub_name(self.path):
                check_access(self.path, self.revision, where="dataset.path")
            return {"path": str(path), "name": self.name, "revision": self.revision}
        if self.revision is not None:
            raise RecipeError(
                "only data sets of the Hub have revisions",
                where="dataset.revision",
                value=self.revision,
                hint="",
            )
        # datasets would leave out a subdirectory that cannot be read.
        self._in_directory()
        saved = saved_table(path)
        if saved is None:
            # Resolved, because load_dataset names the data set after the directory, and "." is not a name.
            return {"path": str(path.resolve()), "name": self.name}
        if not saved:
            raise empty_data(self.path)
        return {"path": "arrow", "data_files": {"train": _escaped(saved)}}

    def _in_directory(self) -> list[Path]:
        """The data files of the directory. Raises :class:`RecipeError` for a subdirectory that cannot be read."""
        files: list[Path] = []
        try:
            for parent, directories, names in walk(Path(self.path).expanduser()):
                # datasets does not read hidden directories. On its first level, a file system has one that only root
                # reads.
                directories[:] = [
                    name for name in directories if not name.startswith((".", "lost+found"))
                ]
                files += [Path(parent, name) for name in names]
        except OSError as error:
            raise RecipeError(
                "a directory of the data set cannot be read",
                where="dataset.path",
                value=f"{error.filename} ({error.strerror})",
                hint="",
            ) from error
        files = [path for path in sorted(files) if path.is_file()]
        return [file for file in files if kind_of(file) in LOADERS and not is_about_data(file)]

    @cached_property
    def _table(self) -> TableRows:
        # Imported here because it takes half a second, and cached samples do not need it.
        import datasets

        from automodel_ckpt.data.rows.datasets_library import TableRows, with_encoded_media

        with self._reading(), TemporaryDirectory() as scratch:
            given = self._arguments()
            if self.is_file:
                # The cache of datasets would keep a copy of files, but the samples are cached already.
                given |= {"cache_dir": scratch, "keep_in_memory": True}
            table = datasets.load_dataset(**given, split=self.split)
            self._report_others(table.info.builder_name)
            return TableRows(self, with_encoded_media(table, datasets))

    def _report_others(self, reader: str) -> None:
        """Warn about files that are ignored: only files of the most common format in a directory are read."""
        if self.is_file or reader not in LOADERS.values():
            return
        root = Path(self.path).expanduser()
        files = self._in_directory()
        others = [str(each.relative_to(root)) for each in files if LOADERS[kind_of(each)] != reader]
        if others:
            shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            log.warning("%s: ignoring files of other formats: %s", self.path, shown)

    def unreadable(self, error: Exception) -> RecipeError:
        """Make the error for data that cannot be read, with the reason."""
        if known := explained(error, self.path, "dataset.path", "dataset"):
            return known
        # The library raises its own errors of generating a table from the reader's.
        reason = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else error
        return RecipeError(
            "the data set cannot be read",
            where="dataset.path, dataset.name, dataset.split",
            value=f"{self.path}, {self.name}, {self.split} ({' '.join(str(reason).split())[:400]})",
            hint="check these settings, and repair damaged files: all rows of Parquet files need the same fields and "
            f"types; a directory needs files named *{', *'.join(LOADERS)}, a Hub name the network or a filled cache; "
            f"relative paths start at {Path.cwd()}",
        )


def _escaped(files: Iterable[Path]) -> list[str]:
    # load_dataset parses a name with brackets as a pattern.
    return [glob.escape(str(file)) for file in files]
