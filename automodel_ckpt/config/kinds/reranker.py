"""The section ``reranker``: training of a model that scores a query together with a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel_ckpt.config.tree.rules import POSITIVE, setting


@dataclass
class RerankerConfig:
    """How a query and a document become one text, and how its scores are compared."""

    template: str | None = None
    """Text of a query and a document, such as "question: {{ query }} passage: {{ document }}"; null: the tokenizer's
    form of two texts, which BERT's tokenizer separates with [SEP]."""
    temperature: float = setting(1.0, POSITIVE)
    """Scores are divided by this number before the softmax over the documents of a query."""
    attention: Literal["model", "bidirectional"] = "model"
    """Which tokens of its text a token sees: those that the model's config states, in a decoder the earlier ones; or
    all of them (bidirectional, also in the export)."""
