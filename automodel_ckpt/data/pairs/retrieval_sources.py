"""The sources of retrieval data in NeMo AutoModel's formats: their rows, and the corpora of their documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.data.rows.files import LOADERS, digest, kind_of
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError

WHERE = "dataset.sources"
"""The key of the recipe that names the sources."""
_HUB = "hf://"
_METADATA = "merlin_metadata.json"
_HUB_METADATA = "dataset_metadata.json"
_TEXTS = "TextQADataset"
_INLINE = (".jsonl", ".csv", ".tsv", ".parquet")


class RowTable(Protocol):
    """Rows that are read one by one."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""

    def row(self, number: int) -> dict[str, Any]:
        """Return the fields of a row."""

    def place(self, row: int) -> str:
        """Return where a row is, for messages."""


@dataclass
class Corpus:
    """Documents by their ids, and what is written before queries and documents."""

    documents: Source
    instructions: tuple[str, str] = ("", "")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        self.documents.require(["id", "text"])
        return {str(name): number for number, name in enumerate(self.documents.values("id"))}

    def text(self, name: str, where: str) -> Any:
        """Return the text of the document *name*. Raises :class:`RecipeError` for *where* if there is none."""
        number = self._numbers.get(name)
        if number is None:
            hint = "add the document to the corpus, or remove this row"
            what = f"the corpus {self.documents.path} has no document with this id"
            raise RecipeError(what, where=where, value=name, hint=hint)
        return self.documents.row(number)["text"]


class RetrievalSource(Protocol):
    """A source that is there; its rows have not been read yet."""

    def fingerprints(self) -> Iterator[str]:
        """Yield texts that change with the content of its files."""

    def rows(self) -> RowTable:
        """Read its rows."""

    def corpora(self) -> Mapping[str, Corpus]:
        """Return its corpora by name: "" for one of all rows; none if the rows contain the documents."""


def open_source(path: str, has_instructions: bool) -> RetrievalSource:
    """Open the source at *path*. Raises :class:`RecipeError` if it has none of the formats, or cannot be read."""
    if path.startswith(_HUB):
        return _OfHub(path, has_instructions)
    kind = kind_of(Path(path))
    if kind in _INLINE:
        return _Inline(Source.of(path))
    if kind == ".json":
        return _WithCorpora.read(Path(path).expanduser())
    raise RecipeError(
        "this is no source of retrieval data",
        where=WHERE,
        value=path,
        hint="name a .json file with a corpus, a .jsonl file with texts, or hf://ORG/NAME/SUBSET",
    )


@dataclass(frozen=True)
class _Inline:
    """A file whose rows contain the documents."""

    source: Source

    def fingerprints(self) -> Iterator[str]:
        yield self.source.fingerprint()

    def rows(self) -> RowTable:
        self.source.require(["pos_doc"])
        return self.source

    def corpora(self) -> Mapping[str, Corpus]:
        return {}


class _OfHub:
    """A subset of a data set of the Hub, with a second one for the documents."""

    def __init__(self, path: str, has_instructions: bool) -> None:
        repo, _, subset = path.removeprefix(_HUB).strip("/").partition("/")
        name, _, subset = subset.partition("/")
        if not repo or not name or not subset:
            hint = "write hf://ORG/NAME/SUBSET; list the subsets that you need as several sources"
            raise RecipeError("the source has no subset", where=WHERE, value=path, hint=hint)
        self._repo, self._subset = f"{repo}/{name}", subset
        self._queries = Source.of(self._repo, subset)
        instructions = ("", "")
        if has_instructions:
            instructions = _instructions_in(self._metadata())
        self._corpus = Corpus(Source.of(self._repo, f"{subset}_corpus"), instructions)

    def _metadata(self) -> Mapping[str, Any]:
        from huggingface_hub import hf_hub_download

        name = f"{self._subset}/{_HUB_METADATA}"
        try:
            path = hf_hub_download(self._repo, name, repo_type="dataset")
        except Exception as error:  # each version of the library has its own exceptions
            known = explained(error, self._repo, WHERE, "dataset")
            raise known or _without_metadata(f"{self._repo}/{name}") from error
        return _mapping_in(Path(path))

    def fingerprints(self) -> Iterator[str]:
        yield self._queries.fingerprint()
        yield self._corpus.documents.fingerprint()
        yield repr(self._corpus.instructions)

    def rows(self) -> RowTable:
        self._queries.require(["question", "pos_doc"])
        return self._queries

    def corpora(self) -> Mapping[str, Corpus]:
        return {"": self._corpus}


@dataclass(frozen=True)
class _JsonRows:
    """The list ``data`` of a JSON file."""

    path: Path
    content: Sequence[Any]

    @property
    def num_rows(self) -> int:
        return len(self.content)

    def row(self, number: int) -> dict[str, Any]:
        row = self.content[number]
        if not isinstance(row, dict):
            hint = "correct or remove it"
            where = self.place(number)
            raise RecipeError("a row is no mapping", where=where, value=str(row)[:80], hint=hint)
        return row

    def place(self, row: int) -> str:
        return f"{self.path}, row {row} of data"


@dataclass(frozen=True)
class _WithCorpora:
    """A JSON file with rows, and directories with the documents of the rows."""

    content: _JsonRows
    of_rows: Mapping[str, Corpus]

    @classmethod
    def read(cls, path: Path) -> _WithCorpora:
        found = _mapping_in(path)
        listed, rows = found.get("corpus"), found.get("data")
        listed = [listed] if isinstance(listed, Mapping) else listed
        if not isinstance(listed, list) or not isinstance(rows, list):
            hint = (
                "the file needs a list corpus with paths of directories, and a list data with rows"
            )
            value = ", ".join(found)
            raise RecipeError("the file has no corpus", where=str(path), value=value, hint=hint)
        corpora = {}
        for each in listed:
            # An absolute path replaces that of the file.
            directory = path.parent / str(each["path"] if isinstance(each, Mapping) else each)
            metadata = _mapping_in(directory / _METADATA)
            if metadata.get("class") != _TEXTS:
                raise RecipeError(
                    "only corpora of texts are supported",
                    where=str(directory / _METADATA),
                    value=metadata.get("class"),
                    hint=f"use a corpus of the class {_TEXTS}, with the fields id and text",
                )
            documents = Source.of(_files_in(directory))
            corpora[str(metadata.get("corpus_id"))] = Corpus(documents, _instructions_in(metadata))
        return cls(_JsonRows(path, rows), corpora)

    def fingerprints(self) -> Iterator[str]:
        yield digest(self.content.path)
        for name, corpus in self.of_rows.items():
            yield f"{name} {corpus.documents.fingerprint()} {corpus.instructions!r}"

    def rows(self) -> RowTable:
        return self.content

    def corpora(self) -> Mapping[str, Corpus]:
        return self.of_rows


def _files_in(directory: Path) -> list[str]:
    """The data files of a corpus: those of the split train, if their names have splits."""
    files = []
    for path in sorted(directory.rglob("*")):
        if kind_of(path) in LOADERS and path.name != _METADATA and path.is_file():
            files.append(str(path))
    of_train = [path for path in files if Path(path).name.startswith("train")]
    if not files:
        hint = "add a file with the fields id and text, such as train.parquet"
        raise RecipeError("a corpus has no files", where=str(directory), value="", hint=hint)
    return of_train or files


def _instructions_in(metadata: Mapping[str, Any]) -> tuple[str, str]:
    return str(metadata.get("query_instruction", "")), str(metadata.get("passage_instruction", ""))


def _mapping_in(path: Path) -> Mapping[str, Any]:
    """The content of a JSON file. Raises :class:`RecipeError` if it cannot be read, or is no mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and path.name == _METADATA:
            raise _without_metadata(str(path)) from error
        hint = "correct the file, or name another one"
        raise RecipeError(
            "the file cannot be read", where=str(path), value=str(error)[:120], hint=hint
        ) from error
    if not isinstance(content, dict):
        hint = "name a .jsonl file for rows that contain their documents"
        raise RecipeError("the file is no mapping", where=str(path), value="a list", hint=hint)
    return content


def _without_metadata(where: str) -> RecipeError:
    hint = f'write {_METADATA}: {{"class": "{_TEXTS}", "corpus_id": NAME}}'
    return RecipeError("the corpus has no metadata", where=where, value="", hint=hint)
