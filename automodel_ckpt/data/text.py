"""Samples from a local file: ``.jsonl``, ``.json``, ``.parquet``, ``.csv``, or ``.txt`` with a document on each line.

Read by the ``datasets`` library, tokenized once and kept in the cache under a digest of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encode import Encoder, Truncation, prepared
from automodel_ckpt.data.tokenized import TokenizedDataset
from automodel_ckpt.errors import RecipeError, os_problem

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def text(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    seq_length: int = 1024,
    field: str = "text",
    truncation: str = "error",
    max_samples: int | None = None,
) -> TokenizedDataset:
    """One sample per document, learnt as a whole, its end token included.

    *field* names the column that holds the text (of ``.txt`` it is ``text``). A document of more than *seq_length*
    tokens is refused with its place, or with *truncation* ``right`` cut and counted in the log.
    """
    policy = Truncation(truncation, seq_length)

    def build() -> TokenizedDataset:
        (documents,) = _columns(Path(path), [field])
        return policy.apply_to_all(Encoder(tokenizer).documents(documents), lambda row: _place(Path(path), row))

    dataset = prepared("text", (_digest(path), field, seq_length, truncation), tokenizer, build)
    dataset.tell_truncation(path, seq_length)
    return dataset.first(max_samples)


def prompt_completion(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    seq_length: int = 1024,
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    truncation: str = "error",
    max_samples: int | None = None,
) -> TokenizedDataset:
    """A sample per row: the prompt without labels, then the completion and the end token with them.

    Prompt and completion are joined as they are: a space or line break between them belongs to one of the two. A sample
    of more than *seq_length* tokens is refused with its place; with *truncation* ``right`` it is cut, or left out where
    the prompt alone is as long, with the counts in the log.
    """
    policy = Truncation(truncation, seq_length)

    def build() -> TokenizedDataset:
        prompts, completions = _columns(Path(path), [prompt_field, completion_field])
        samples = Encoder(tokenizer).pairs(prompts, completions)
        return policy.apply_to_all(samples, lambda row: _place(Path(path), row))

    key = (_digest(path), prompt_field, completion_field, seq_length, truncation)
    dataset = prepared("prompt_completion", key, tokenizer, build)
    dataset.tell_truncation(path, seq_length)
    return dataset.first(max_samples)


def _digest(path: str) -> str:
    """Of the content; :class:`RecipeError` when there is no such file or it is of no known kind."""
    suffix = Path(path).suffix
    if suffix not in _LOADERS:
        remedy = f"use a file named {', '.join('*' + known for known in _LOADERS)}"
        raise RecipeError("the kind of a data file is not known", where="dataset.path", value=path, remedy=remedy)
    try:
        with Path(path).open("rb") as file:
            return suffix + hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        remedy = f"check dataset.path; a relative one starts from the working directory, {Path.cwd()}"
        raise RecipeError.all_of([os_problem(error, "a data file cannot be read", remedy=remedy)]) from error


def _columns(path: Path, fields: Sequence[str]) -> list[list[str]]:
    """The texts of each field, row by row; :class:`RecipeError` with file and line for whatever is not a text."""
    table = _read_table(path)
    if table.num_rows == 0:
        remedy = "give a file with at least one sample"
        raise RecipeError("the data file is empty", where=str(path), value="0 samples", remedy=remedy)
    if missing := [field for field in fields if field not in table.column_names]:
        raise RecipeError(
            f"the data file has no field {', '.join(missing)}",
            where=str(path),
            value=f"its fields are {', '.join(table.column_names)}",
            remedy="name the fields to use in the dataset section, or rename those of the file",
        )
    columns = [list(table[field]) for field in fields]
    for field, values in zip(fields, columns, strict=True):
        _require_texts(path, field, values)
    return columns


def _require_texts(path: Path, field: str, values: list[Any]) -> None:
    for row, value in enumerate(values):
        if not isinstance(value, str):
            what = f"field {field} of a sample is {'missing' if value is None else 'not a text'}"
            raise RecipeError(what, where=_place(path, row), value=value, remedy="correct or leave out this sample")


def _read_table(path: Path) -> Any:
    # Imported here because it takes half a second and is not needed when the samples are prepared.
    import datasets  # type: ignore[import-untyped]

    if path.stat().st_size == 0:
        return datasets.Dataset.from_dict({})
    with TemporaryDirectory() as scratch, _quiet_progress_bars(datasets):
        try:
            return datasets.load_dataset(
                _LOADERS[path.suffix], data_files=str(path), split="train", cache_dir=scratch, keep_in_memory=True
            )
        except datasets.exceptions.DatasetGenerationError as error:
            raise _unreadable(path, error) from error


@contextmanager
def _quiet_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _unreadable(path: Path, error: Exception) -> RecipeError:
    """The line that is no JSON, found by reading again; otherwise the reader's own words."""
    remedy = "correct or leave out this line"
    for number, line in _lines(path) if path.suffix == ".jsonl" else ():
        try:
            json.loads(line)
        except ValueError as fault:
            return RecipeError("a line is not JSON", where=f"{path}:{number}", value=str(fault), remedy=remedy)
    remedy = "every row must have the same fields with values of the same types"
    reason = str(error.__cause__ or error)
    return RecipeError("the data file cannot be read", where=str(path), value=reason, remedy=remedy)


def _place(path: Path, row: int) -> str:
    """File and line of a row where rows are lines, else its number from 0."""
    if path.suffix == ".jsonl":
        for index, (number, _) in enumerate(_lines(path)):
            if index == row:
                return f"{path}:{number}"
    return f"{path}, row {row}"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, numbered from 1."""
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
