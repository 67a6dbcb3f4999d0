"""The section ``embedding``: contrastive training of text embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel_ckpt.config.tree.rules import POSITIVE, setting


@dataclass
class EmbeddingConfig:
    """How texts become embeddings, and what the embeddings are trained for."""

    pooling: Literal["mean", "cls", "last"] = "mean"
    """The hidden states that an embedding is made of: the mean over the text's tokens, its first or its last token."""
    attention: Literal["model", "bidirectional"] = "model"
    """Which tokens of its text a token sees: those that the model's config states, in a decoder the earlier ones; or
    all of them (bidirectional, also in the export)."""
    normalize: bool = True
    """Scale embeddings to the length 1, so that their dot product is the cosine similarity."""
    temperature: float = setting(0.05, POSITIVE)
    """Similarities are divided by this number before the softmax."""
    symmetric: bool = False
    """Average the loss with that of finding the query of each document among all queries."""
    negatives: Literal["global_batch", "micro_batch", "own"] = "global_batch"
    """Whose texts are the negatives of a pair. global_batch: those of the whole global batch, so that the loss depends
    neither on accumulation nor on the number of ranks; accumulation then costs a second forward pass. micro_batch:
    those of one micro-batch of each rank. own: only the negatives in the row of the pair."""
    hide_equal_texts: bool = True
    """Pairs with an equal query or document are not negatives of each other."""
    query_prompt: str = ""
    """Text before each query, in training and in the export."""
    document_prompt: str = ""
    """Text before each document, in training and in the export."""
