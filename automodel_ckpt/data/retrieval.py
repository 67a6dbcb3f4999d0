"""Builder for retrieval data in NeMo AutoModel's formats: queries with documents in a corpus, or in their rows.

Facts about the formats are from AutoModel's source, revision 36044ad3d: ``retrieval_dataset.py`` and
``retrieval_dataset_inline.py`` in ``components/datasets/llm``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.data.collate import Item, require_range
from automodel_ckpt.data.rows.files import LOADERS, digest, kind_of
from automodel_ckpt.data.rows.rows import ColumnRows, Columns, Rows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.samples import samples_of_rows
from automodel_ckpt.data.samples.tokenized import EarlierTruncation, Samples, TokenizedDataset
from automodel_ckpt.data.text_pairs import TextsEncoder, texts_of
from automodel_ckpt.errors import RecipeError

WHERE = "dataset.sources"
"""The key of the recipe that names the sources."""
_ON_HUB = re.compile(r"hf://([^/]+/[^/]+)/([^/].*?)/?")
"""The name of a data set of the Hub, and a subset of it."""
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

    def text(self, name: str) -> Any:
        """Return the text of the document *name*; None if there is none."""
        number = self._numbers.get(name)
        return None if number is None else self.documents.row(number)["text"]


@dataclass(frozen=True)
class RetrievalSource:
    """The *table* of the queries, of which rows have the *fields*, with corpora by name.

    The name "" stands for one corpus of all rows. Without a corpus, the rows contain the documents. *num_samples* rows
    are used (None: all).
    """

    table: Rows
    fingerprint: Callable[[], str]
    fields: Sequence[str] = ()
    corpora: Mapping[str, Corpus] = field(default_factory=dict)
    num_samples: int | None = None

    def fingerprints(self) -> list[str]:
        """Texts that change with the content of its files."""
        # Checkpoints contain a digest of them: another form would report that the data has changed.
        found = [f"{self.num_samples}", self.fingerprint()]
        for name, corpus in self.corpora.items():
            parts = [corpus.documents.fingerprint(), repr(corpus.instructions)]
            found += [" ".join([name, *parts])] if name else parts
        return found

    def rows(self, seed: int) -> Sequence[int]:
        """The rows that are used. Raises :class:`RecipeError` if the table lacks a field."""
        self.table.require(self.fields)
        chosen: Sequence[int] = range(self.table.num_rows)
        if self.num_samples is None or self.num_samples >= len(chosen):
            return chosen
        # As AutoModel draws them.
        return random.Random(seed).sample(chosen, self.num_samples)

    def texts(self, number: int, num_negatives: int, *, has_instructions: bool) -> Item:
        """The texts of row *number*. Raises :class:`RecipeError` for a row that lacks one."""
        row = self.table.row(number)
        corpus = self.corpora.get("") or self.corpora.get(str(row.get("corpus_id")))
        if self.corpora and corpus is None:
            known = f"{row.get('corpus_id')}; the file has {', '.join(self.corpora)}"
            raise self.table.unusable(number, "the corpus of a row is unknown", known)
        query = row.get("question")
        if corpus is None and row.get("query") is not None:
            query = row["query"]
        positives, negatives = _listed(row.get("pos_doc")), _listed(row.get("neg_doc"))
        if not positives or (num_negatives and not negatives):
            raise self.table.unusable(
                number,
                f"a query has no {'neg_doc' if positives else 'pos_doc'}",
                str(query)[:80],
                "complete or remove this row, or set num_negatives 0 for rows without neg_doc",
            )
        chosen = [positives[0]]
        chosen += [negatives[index % len(negatives)] for index in range(num_negatives)]
        documents = []
        for each in chosen:
            document = each if isinstance(each, Mapping) else {"id" if corpus else "text": each}
            text = document.get("text")
            if corpus is not None and not text:
                text = corpus.text(str(document.get("id")))
                if text is None:
                    what = f"the corpus {corpus.documents.path} has no document with this id and a text"
                    raise self.table.unusable(number, what, document.get("id"))
            documents.append(text)
        if has_instructions and corpus is not None:
            before_query, before_document = corpus.instructions
            query = _after(before_query, query)
            documents = [_after(before_document, text) for text in documents]
        return {"query": query, "positive": documents[0], "negatives": documents[1:]}


def open_source(given: Any, has_instructions: bool) -> RetrievalSource:
    """Open a source as the recipe names it: a path, or a mapping ``{path, num_samples}``.

    Raises :class:`RecipeError` if it has none of the formats, or cannot be read.
    """
    path, count = given, None
    if isinstance(given, Mapping) and given.keys() <= {"path", "num_samples"}:
        path, count = given.get("path"), given.get("num_samples")
    found = None
    if isinstance(path, str) and (count is None or (isinstance(count, int) and count >= 1)):
        kind = kind_of(Path(path))
        if on_hub := _ON_HUB.fullmatch(path):
            repo, subset = on_hub.groups()
            found = _of_hub(repo, subset, has_instructions)
        elif kind in _INLINE:
            table = Source.of(path)
            found = RetrievalSource(table, table.fingerprint, ["pos_doc"])
        elif kind == ".json":
            found = _with_corpora(Path(path).expanduser())
    if found is None:
        raise RecipeError(
            "this is no source of retrieval data",
            where=WHERE,
            value=str(given)[:80],
            hint="name a .json file with a corpus, a .jsonl file with texts, or hf://ORG/NAME/SUBSET; or write "
            "{path: SOURCE, num_samples: 1000}",
        )
    return replace(found, num_samples=count)


def _of_hub(repo: str, subset: str, has_instructions: bool) -> RetrievalSource:
    """A subset of a data set of the Hub, with a second one for the documents."""
    instructions = ("", "")
    if has_instructions:
        instructions = _instructions_in(_hub_metadata(repo, subset))
    corpus = Corpus(Source.of(repo, f"{subset}_corpus"), instructions)
    table = Source.of(repo, subset)
    return RetrievalSource(table, table.fingerprint, ["question", "pos_doc"], {"": corpus})


def _hub_metadata(repo: str, subset: str) -> Item:
    from huggingface_hub import hf_hub_download

    name = f"{subset}/{_HUB_METADATA}"
    try:
        path = hf_hub_download(repo, name, repo_type="dataset")
    except Exception as error:  # each version of the library has its own exceptions
        known = explained(error, repo, WHERE, "dataset")
        raise known or _unreadable(f"{repo}/{name}", error) from error
    return _mapping_in(Path(path))


def _with_corpora(path: Path) -> RetrievalSource:
    """A JSON file with rows, and directories with the documents of the rows."""
    found = _mapping_in(path)
    listed, rows = found.get("corpus"), found.get("data")
    listed = [listed] if isinstance(listed, Mapping) else listed
    if not isinstance(listed, list) or not isinstance(rows, list):
        raise _unreadable(path, "it has no list corpus with directories, or no list data with rows")
    corpora = {}
    for each in listed:
        # An absolute path replaces the file's path.
        directory = path.parent / str(each["path"] if isinstance(each, Mapping) else each)
        metadata = _mapping_in(directory / _METADATA)
        if metadata.get("class") != _TEXTS:
            raise _unreadable(directory / _METADATA, f"its class is {metadata.get('class')}")
        documents = Source.of(_files_in(directory))
        corpora[str(metadata.get("corpus_id"))] = Corpus(documents, _instructions_in(metadata))
    placed = []
    for number, row in enumerate(rows):
        where = f"{path}, row {number} of data"
        if not isinstance(row, dict):
            raise _unreadable(where, f"not a mapping: {row}")
        placed.append((row, where))
    table = ColumnRows.of(str(path), placed)
    return RetrievalSource(table, partial(digest, path), corpora=corpora)


def _files_in(directory: Path) -> list[str]:
    """The data files of a corpus. If their names have splits, only the files of the split train."""
    files = []
    for path in sorted(directory.rglob("*")):
        if kind_of(path) in LOADERS and path.name != _METADATA and path.is_file():
            files.append(str(path))
    if not files:
        raise _unreadable(directory, "it has no file of documents, such as train.parquet")
    return [path for path in files if Path(path).name.startswith("train")] or files


def _instructions_in(metadata: Item) -> tuple[str, str]:
    return str(metadata.get("query_instruction", "")), str(metadata.get("passage_instruction", ""))


def _mapping_in(path: Path) -> Item:
    """The content of a JSON file. Raises :class:`RecipeError` if it cannot be read, or is no mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise _unreadable(path, f"a {type(content).__name__} instead of a mapping")
    return content


def _unreadable(where: object, reason: object) -> RecipeError:
    return RecipeError(
        "retrieval data cannot be read",
        where=where,
        value=str(reason)[:120],
        hint="name a .jsonl file for rows that contain their documents; a corpus needs files with the fields id and "
        f'text, and a file {_METADATA}: {{"class": "{_TEXTS}", "corpus_id": NAME}}',
    )


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

    * ``hf://ORG/NAME/SUBSET``: a data set of the Hub. Its subset has the fields ``question``, ``pos_doc`` and
      ``neg_doc`` with ids of documents, and its subset ``SUBSET_corpus`` has ``id`` and ``text``;
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
    encoder = TextsEncoder(tokenizer, seq_length, truncation, pair_template, query_length)

    def encode(rows: Rows) -> Samples:
        texts = texts_of(rows, "query", "positive", ["negatives"], (query_prompt, document_prompt))
        return encoder.samples(texts, rows)

    rows = RetrievalRows(sources, num_negatives, seed, instructions)
    limits = (truncation, seq_length, query_length)
    return samples_of_rows(
        rows,
        rows.fingerprint(),
        tokenizer,
        encode,
        EarlierTruncation.of("right", seq_length),
        key=("retrieval", query_prompt, document_prompt, pair_template, *limits),
        max_samples=max_samples,
    )


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


def _after(instruction: str, text: Any) -> Any:
    return f"{instruction} {text}" if instruction and isinstance(text, str) else text


class RetrievalRows(Rows):
    """The texts of the queries of several sources, in their order: fields ``query``, ``positive`` and ``negatives``."""

    def __init__(
        self, sources: Sequence[Any], num_negatives: int, seed: int, has_instructions: bool
    ) -> None:
        require_range("num_negatives", num_negatives, 0)
        require_range("sources", len(sources), 1)
        self.path = f"{len(sources)} sources" if len(sources) > 1 else str(sources[0])
        self._options = (num_negatives, seed, has_instructions)
        self._sources = [open_source(each, has_instructions) for each in sources]
        # Fields of the same rows are read one after another.
        self._texts = lru_cache(maxsize=1)(self._read_texts)

    def fingerprint(self) -> str:
        """A text that changes with the texts. Raises :class:`RecipeError` if they cannot be read."""
        parts = [" ".join(map(str, self._options))]
        for source in self._sources:
            parts += source.fingerprints()
        return "\n".join(parts)

    @cached_property
    def _rows(self) -> list[tuple[RetrievalSource, int]]:
        """The source and the number of each row that is used."""
        _, seed, _ = self._options
        return [(source, number) for source in self._sources for number in source.rows(seed)]

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def fields(self) -> Sequence[str]:
        return _FIELDS

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> Columns:
        return [[texts[name] for texts in self._texts(start, stop)] for name in fields]

    def _read_texts(self, start: int, stop: int) -> list[Item]:
        num_negatives, _, has_instructions = self._options
        found = []
        for source, number in self._rows[start:stop]:
            found.append(source.texts(number, num_negatives, has_instructions=has_instructions))
        return found

    def place(self, row: int) -> str:
        source, number = self._rows[row]
        return source.table.place(number)
