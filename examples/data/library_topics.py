"""Docstrings of Python's standard library, labeled with their modules: for the recipe ``sequence_classification``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.classification import TextEncoder, labeled_texts
from automodel_ckpt.data.collate import require_choice, require_tokenizer
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.labels import Labels
from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.examples.data.python_library import library_digest, library_docstrings


def library_topics(
    tokenizer: PreTrainedTokenizerBase,
    labels: Labels,
    seq_length: int = 128,
    split: str = "train",
    max_samples: int | None = None,
) -> TokenizedDataset:
    """Make a sample of each docstring in modules of the standard library; its label is the name of the module.

    ``classification.labels`` are names of modules or packages, such as asyncio. Docstrings are truncated to
    *seq_length* tokens. About a tenth of them, chosen by a hash of their text, is the validation split. Raises
    :class:`RecipeError` for a module without docstrings.
    """
    require_choice("split", split, ("train", "validation"))
    encoder = TextEncoder(require_tokenizer(tokenizer), "text", None, None, "right", seq_length)
    rows = _TopicRows(lambda: library_docstrings(labels.names, split))
    return labeled_texts(
        "classification-library_topics",
        rows,
        library_digest(),
        encoder,
        "label",
        lambda: labels.targets,
        key=(split, str(labels)),
        max_samples=max_samples,
    )


class _TopicRows(Rows):
    """A table of (module, docstring)."""

    path = "the standard library"

    def __init__(self, pairs: Callable[[], list[tuple[str, str]]]) -> None:
        self._pairs = pairs

    @cached_property
    def _columns(self) -> dict[str, list[str]]:
        modules, docstrings = zip(*self._pairs(), strict=True)
        return {"label": list(modules), "text": list(docstrings)}

    @property
    def num_rows(self) -> int:
        return len(self._columns["text"])

    @property
    def fields(self) -> Sequence[str]:
        return list(self._columns)

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> list[list[Any]]:
        return [self._columns[field][start:stop] for field in fields]

    def place(self, row: int) -> str:
        return f"{self.path}, {self._columns['label'][row]}"
