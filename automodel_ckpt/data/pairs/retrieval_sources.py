"""The sources of retrieval data in NeMo AutoModel's formats: their rows, and the corpora of their documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class JsonRows:
    """The list ``data`` of a JSON file."""

    path: Path
    content: Sequence[Any]

    @property
    def num_rows(self) -> int:
        return len(self.content)

    def fingerprint(self) -> str:
        """A text that changes with the content of the file."""
        return digest(self.path)

    def row(self, number: int) -> dict[str, Any]:
        """The fields of a row."""
        row = self.content[number]
        if not isinstance(row, dict):
            hint = "correct or remove it"
            where = self.place(number)
            raise RecipeError("a row is no mapping", where=where, value=str(row)[:80], hint=hint)
        return row

    def place(self, row: int) -> str:
        """The location of a row."""
        return f"{self.path}, row {row} of data"


@dataclass(frozen=True)
class RetrievalSource:
    """The *table* of the queries, of which rows have the *fields*, with corpora by name.

    The name "" is that of one corpus of all rows. Without a corpus, the rows contain the documents.
    """

    table: Source | JsonRows
    fields: Sequence[str] = ()
    corpora: Mapping[str, Corpus] = field(default_factory=dict)

    def fingerprints(self) -> Iterator[str]:
        """Yield texts that change with the content of its files."""
        yield self.table.fingerprint()
        for name, corpus in self.corpora.items():
            separator = " " if name else "\n"
            parts = [name, corpus.documents.fingerprint(), repr(corpus.instructions)]
            yield separator.join(part for part in parts if part)

    def rows(self) -> Source | JsonRows:
        """The rows. Raises :class:`RecipeError` if they lack a field."""
        if isinstance(self.table, Source):
            self.table.require(self.fields)
        return self.table


def open_source(path: str, has_instructions: bool) -> RetrievalSource:
    """Open the source at *path*. Raises :class:`RecipeError` if it has none of the formats, or cannot be read."""
    if path.startswith(_HUB):
        return _of_hub(path, has_instructions)
    kind = kind_of(Path(path))
    if kind in _INLINE:
        return RetrievalSource(Source.of(path), ["pos_doc"])
    if kind == ".json":
        return _with_corpora(Path(path).expanduser())
    raise RecipeError(
        "this is no source of retrieval data",
        where=WHERE,
        value=path,
        hint="name a .json file with a corpus, a .jsonl file with texts, or hf://ORG/NAME/SUBSET",
    )


def _of_hub(path: str, has_instructions: bool) -> RetrievalSource:
    """A subset of a data set of the Hub, with a second one for the documents."""
    owner, _, rest = path.removeprefix(_HUB).strip("/").partition("/")
    name, _, subset = rest.partition("/")
    if not owner or not name or not subset:
        hint = "write hf://ORG/NAME/SUBSET; list the subsets that you need as several sources"
        raise RecipeError("the source has no subset", where=WHERE, value=path, hint=hint)
    repo = f"{owner}/{name}"
    instructions = ("", "")
    if has_instructions:
        instructions = _instructions_in(_hub_metadata(repo, subset))
    corpus = Corpus(Source.of(repo, f"{subset}_corpus"), instructions)
    return RetrievalSource(Source.of(repo, subset), ["question", "pos_doc"], {"": corpus})


def _hub_metadata(repo: str, subset: str) -> Mapping[str, Any]:
    from huggingface_hub import hf_hub_download

    name = f"{subset}/{_HUB_METADATA}"
    try:
        path = hf_hub_download(repo, name, repo_type="dataset")
    except Exception as error:  # each version of the library has its own exceptions
        known = explained(error, repo, WHERE, "dataset")
        raise known or _without_metadata(f"{repo}/{name}") from error
    return _mapping_in(Path(path))


def _with_corpora(path: Path) -> RetrievalSource:
    """A JSON file with rows, and directories with the documents of the rows."""
    found = _mapping_in(path)
    listed, rows = found.get("corpus"), found.get("data")
    listed = [listed] if isinstance(listed, Mapping) else listed
    if not isinstance(listed, list) or not isinstance(rows, list):
        hint = "the file needs a list corpus with paths of directories, and a list data with rows"
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
    return RetrievalSource(JsonRows(path, rows), corpora=corpora)


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
