"""HellaSwag: the right one of four endings of a story."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encode import Truncation
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.text import prepared_pairs
from automodel_ckpt.data.tokenized import TokenizedDataset
from automodel_ckpt.errors import RecipeError


def hellaswag(
    tokenizer: PreTrainedTokenizerBase,
    path: str = "Rowan/hellaswag",
    seq_length: int = 512,
    split: str = "train",
    truncation: str = "error",
    max_samples: int | None = None,
) -> TokenizedDataset:
    """Prompt: the beginning. Completion, with labels: the right ending.

    *path* is a data set of the Hub, or a local file or directory, with the columns ``ctx``, ``endings`` (four texts)
    and ``label`` (the right one's number from 0, as text or number). A row without a label, as the split ``test`` has
    them, is refused with its place. *truncation* as for :func:`~automodel_ckpt.data.text.prompt_completion`.
    """
    policy, source = Truncation(truncation, seq_length), Source(path, split=split)

    def read() -> tuple[list[str], list[str]]:
        (beginnings,) = source.texts(["ctx"])
        endings, labels = source.columns(["endings", "label"])
        chosen = enumerate(zip(endings, labels, strict=True))
        return [text.strip() for text in beginnings], [f" {_ending(source, row, *each)}" for row, each in chosen]

    return prepared_pairs(tokenizer, source, policy, ("hellaswag",), read).first(max_samples)


def _ending(source: Source, row: int, endings: Any, label: Any) -> str:
    try:
        number = int(label)
        if number < 0:
            raise IndexError
        return str(endings[number]).strip()
    except (ValueError, TypeError, IndexError) as error:
        raise RecipeError(
            "a row does not say which ending is right",
            where=source.place(row),
            value=f"label {label!r}, {len(endings) if isinstance(endings, list) else 'no'} endings",
            remedy="use the split train or validation (the split test has no labels)",
        ) from error
