"""Builder for retrieval data in NeMo AutoModel's formats: queries whose documents are in a corpus, or in their rows.

Facts about the formats are from AutoModel's source, revision 36044ad3d: ``retrieval_dataset.py`` and
``retrieval_dataset_inline.py`` in ``components/datasets/llm``.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.pairs.retrieval_sources import (
    WHERE,
    Corpus,
    JsonRows,
    open_source,
)
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.samples import samples_of_rows
from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.data.text_pairs import PairReader, TextTruncation, encoder_of
from automodel_ckpt.errors import RecipeError

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


@dataclass(frozen=True)
class _Part:
    """The rows of a source, of which *chosen* are used, with their corpora by name ("": of all rows; none: inline)."""

    rows: Source | JsonRows
    chosen: Sequence[int]
    corpora: Mapping[str, Corpus] = field(default_factory=dict)

    def texts(self, number: int, num_negatives: int, *, has_instructions: bool) -> dict[str, Any]:
        """The texts of row *number*. Raises :class:`RecipeError` for a row that lacks one."""
        row, where = self.rows.row(number), self.rows.place(number)
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

    def _corpus_of(self, row: Mapping[str, Any], where: str) -> Corpus | None:
        if not self.corpora or "" in self.corpora:
            return self.corpora.get("")
        name = str(row.get("corpus_id"))
        if name not in self.corpora:
            hint = f"the file has {', '.join(self.corpora)}"
            raise RecipeError("the corpus of a row is unknown", where=where, value=name, hint=hint)
        return self.corpora[name]


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
        self._last_texts: list[dict[str, Any]] = []

    def fingerprint(self) -> str:
        """A text that changes with the texts. Raises :class:`RecipeError` if they cannot be read."""
        parts = [f"{self._num_negatives} {self._seed} {self._has_instructions}"]
        for entry, opened in self.open_source:
            parts += [f"{entry.num_samples}", *opened.fingerprints()]
        return "\n".join(parts)

    @cached_property
    def _parts(self) -> list[_Part]:
        parts = []
        for entry, opened in self.open_source:
            rows = opened.rows()
            chosen: Sequence[int] = range(rows.num_rows)
            if entry.num_samples is not None and entry.num_samples < len(chosen):
                # As AutoModel draws them.
                chosen = random.Random(self._seed).sample(chosen, entry.num_samples)
            parts.append(_Part(rows, chosen, opened.corpora))
        return parts

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(part.chosen) for part in self._parts))

    @property
    def num_rows(self) -> int:
        return self._ends[-1]

    @property
    def fields(self) -> Sequence[str]:
        return _FIELDS

    def read(self, fields: Sequence[str]) -> list[list[Any]]:
        return self.read_range(fields, 0, self.num_rows)

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> list[list[Any]]:
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
        return part.rows.place(inner)

    def _find(self, number: int) -> tuple[_Part, int]:
        index = bisect_right(self._ends, number)
        part = self._parts[index]
        return part, part.chosen[number - (self._ends[index] - len(part.chosen))]
