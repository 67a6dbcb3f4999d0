"""Builder for retrieval data in NeMo AutoModel's formats: queries whose documents are in a corpus, or in their rows.

Facts about the formats are from AutoModel's source, revision 36044ad3d: ``retrieval_dataset.py`` and
``retrieval_dataset_inline.py`` in ``components/datasets/llm``.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.data.collate import Item
from automodel_ckpt.data.rows.files import LOADERS, digest, kind_of
from automodel_ckpt.data.rows.rows import (
    Columns,
    Rows,
)
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.samples import samples_of_rows
from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.data.text_pairs import PairReader, TextTruncation, encoder_of
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

    def row(self, number: int) -> Item:
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

    def require_fields(self) -> None:
        """Raise :class:`RecipeError` if the rows lack a field."""
        if isinstance(self.table, Source):
            self.table.require(self.fields)

    def texts(self, number: int, num_negatives: int, *, has_instructions: bool) -> Item:
        """The texts of row *number*. Raises :class:`RecipeError` for a row that lacks one."""
        row, where = self.table.row(number), self.table.place(number)
        corpus = self._corpus_of(row, where)
        query = row.get("question")
        if corpus is None and row.get("query") is not None:
            query = row["query"]
        positives, negatives = _listed(row.get("pos_doc")), _listed(row.get("neg_doc"))
        if not positives or (num_negatives and not negatives):
            name = "neg_doc" if positives else "pos_doc"
            hint = "complete or remove this row"
            if positives:
                hint += ", or set num_negatives 0"
            raise RecipeError(
                f"a query has no {name}", where=where, value=str(query)[:80], hint=hint
            )
        chosen = [positives[0]]
        chosen += [negatives[index % len(negatives)] for index in range(num_negatives)]
        documents = [_text_of(each, corpus, where) for each in chosen]
        if has_instructions:
            before_query, before_document = corpus.instructions if corpus else ("", "")
            query = _after(before_query, query)
            documents = [_after(before_document, text) for text in documents]
        return {"query": query, "positive": documents[0], "negatives": documents[1:]}

    def _corpus_of(self, row: Item, where: str) -> Corpus | None:
        if not self.corpora or "" in self.corpora:
            return self.corpora.get("")
        name = str(row.get("corpus_id"))
        if name not in self.corpora:
            hint = f"the file has {', '.join(self.corpora)}"
            raise RecipeError("the corpus of a row is unknown", where=where, value=name, hint=hint)
        return self.corpora[name]


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


def _hub_metadata(repo: str, subset: str) -> Item:
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


def _instructions_in(metadata: Item) -> tuple[str, str]:
    return str(metadata.get("query_instruction", "")), str(metadata.get("passage_instruction", ""))


def _mapping_in(path: Path) -> Item:
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


_FIELDS = ("query", "positive", "negatives")


def retrieval(
    tokenizer: PreTrainedTokenizerBase,
    sources: list[Any],
    num_negatives: int = 4,
    seq_length: int | None = 512,
    query_length: int | None = None,
    instructions: bool = False,
    query_prompt: str = "",
    document_prompt: str = "",
    pair_template: str | None = None,
    truncation: Literal["error", "right"] = "right",
    seed: int = 42,
    max_samples: int | None = None,
) -> TokenizedDataset:
    """Make one sample per query: the query, its first document, and *num_negatives* others.

    Each of *sources* is one of these, or a mapping ``{path: SOURCE, num_samples: N}``, of which *seed* selects N rows:

    * ``hf://ORG/NAME/SUBSET``: a data set of the Hub, whose subset has the fields ``question``, ``pos_doc`` and
      ``neg_doc`` with ids of documents, and whose subset ``SUBSET_corpus`` has ``id`` and ``text``;
    * a ``.json`` file ``{"corpus": [{"path": DIRECTORY}], "data": ROWS}`` with such rows. A directory, relative to the
      file, contains documents and a ``merlin_metadata.json``;
    * a ``.jsonl``, CSV or Parquet file with the fields ``query`` (or ``question``), ``pos_doc`` and ``neg_doc``, which
      contain texts, lists of texts, or mappings with a ``text``.

    Negatives are repeated in their order if a row has fewer. With *instructions*, the ``query_instruction`` and the
    ``passage_instruction`` of the corpus, each with a space, are written before texts. The recipe supplies the
    prompts or the template.
    A text of more than *seq_length* tokens, a query of more than *query_length* (None: *seq_length*), is truncated or
    rejected as in :func:`~automodel_ckpt.data.text_pairs.text_pairs`.
    """
    encoder = encoder_of(tokenizer, seq_length, truncation, pair_template, query_length)
    reader = PairReader(
        encoder, "query", "positive", ["negatives"], None, query_prompt, document_prompt
    )
    rows = RetrievalRows([_Entry.of(each) for each in sources], num_negatives, seed, instructions)
    limits = (truncation, seq_length, query_length)
    return samples_of_rows(
        rows,
        rows.fingerprint(),
        tokenizer,
        reader.encode,
        TextTruncation.of("right", seq_length),
        key=("retrieval", query_prompt, document_prompt, pair_template, *limits),
        max_samples=max_samples,
    )


@dataclass(frozen=True)
class _Entry:
    """A source as the recipe names it; *num_samples* None: all of its rows."""

    path: str
    num_samples: int | None = None

    @classmethod
    def of(cls, given: Any) -> _Entry:
        if isinstance(given, str):
            return cls(given)
        is_mapping = isinstance(given, Mapping) and isinstance(given.get("path"), str)
        count = given.get("num_samples") if is_mapping else None
        is_count = count is None or (isinstance(count, int) and count >= 1)
        if not is_mapping or set(given) - {"path", "num_samples"} or not is_count:
            hint = "write a path, hf://ORG/NAME/SUBSET, or {path: SOURCE, num_samples: 1000}"
            raise RecipeError(
                "this is no source of retrieval data",
                where=WHERE,
                value=str(given)[:80],
                hint=hint,
            )
        return cls(given["path"], count)


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


def _text_of(document: Any, corpus: Corpus | None, where: str) -> Any:
    """The text of a document, which is named by its id if there is a *corpus*."""
    is_mapping = isinstance(document, Mapping)
    if corpus is None or (is_mapping and document.get("text")):
        return document.get("text") if is_mapping else document
    return corpus.text(str(document["id"] if is_mapping else document), where)


def _after(instruction: str, text: Any) -> Any:
    return f"{instruction} {text}" if instruction and isinstance(text, str) else text


class RetrievalRows(Rows):
    """The texts of the queries of several sources, in their order: fields ``query``, ``positive`` and ``negatives``."""

    def __init__(
        self, entries: Sequence[_Entry], num_negatives: int, seed: int, has_instructions: bool
    ) -> None:
        if not entries or num_negatives < 0:
            raise RecipeError(
                "retrieval data needs at least one source, and num_negatives of at least 0",
                where="dataset",
                value=f"{len(entries)} sources, num_negatives {num_negatives}",
                hint="correct these arguments",
            )
        self.path = ", ".join(entry.path for entry in entries[:2])
        if len(entries) > 2:
            self.path = f"{entries[0].path} and {len(entries) - 1} more"
        self._num_negatives = num_negatives
        self._seed = seed
        self._has_instructions = has_instructions
        self.open_source = [(entry, open_source(entry.path, has_instructions)) for entry in entries]
        # Fields of the same rows are read one after another.
        self._last_range: tuple[int, int] | None = None
        self._last_texts: list[Item] = []

    def fingerprint(self) -> str:
        """A text that changes with the texts. Raises :class:`RecipeError` if they cannot be read."""
        parts = [f"{self._num_negatives} {self._seed} {self._has_instructions}"]
        for entry, opened in self.open_source:
            parts += [f"{entry.num_samples}", *opened.fingerprints()]
        return "\n".join(parts)

    @cached_property
    def _parts(self) -> list[tuple[RetrievalSource, Sequence[int]]]:
        """The sources, each with the rows of it that are used."""
        parts = []
        for entry, opened in self.open_source:
            opened.require_fields()
            chosen: Sequence[int] = range(opened.table.num_rows)
            if entry.num_samples is not None and entry.num_samples < len(chosen):
                # As AutoModel draws them.
                chosen = random.Random(self._seed).sample(chosen, entry.num_samples)
            parts.append((opened, chosen))
        return parts

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(chosen) for _, chosen in self._parts))

    @property
    def num_rows(self) -> int:
        return self._ends[-1]

    @property
    def fields(self) -> Sequence[str]:
        return _FIELDS

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        if self._last_range != (start, stop):
            self._last_texts = []
            for number in range(start, stop):
                part, inner = self._find(number)
                count, has_instructions = self._num_negatives, self._has_instructions
                texts = part.texts(inner, count, has_instructions=has_instructions)
                self._last_texts.append(texts)
            self._last_range = (start, stop)
        return [[texts[name] for texts in self._last_texts] for name in fields]

    def place(self, row: int) -> str:
        part, inner = self._find(row)
        return part.table.place(inner)

    def _find(self, number: int) -> tuple[RetrievalSource, int]:
        index = bisect_right(self._ends, number)
        part, chosen = self._parts[index]
        return part, chosen[number - (self._ends[index] - len(chosen))]
