"""Losses of texts that are ranked: of pairs by InfoNCE (arXiv:1807.03748), and of scores in lists (listwise softmax).

In InfoNCE, each query has to find its document among the documents of all other pairs. Retrieval libraries call it
multiple negatives ranking. The functions are pure: they get the embeddings of all ranks and return the values of this
rank's pairs. In a list, the first score has to be the highest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Texts:
    """The texts of all ranks: *queries* [Q] and *documents* [D] are digests, equal for equal texts.

    Document i < Q belongs to query i; the others are further negatives. *has_query* [Q] and *has_document* [D] are
    false for rows that only pad the part of a rank.
    """

    queries: Tensor
    documents: Tensor
    has_query: Tensor
    has_document: Tensor


@dataclass(frozen=True)
class Candidates:
    """The embeddings *queries* [Q, H] and *documents* [D, H] of :class:`Texts`, and the pairs that are ranked in them.

    *own* [B] are the numbers of this rank's pairs. *hides_documents* [B, D] and *hides_queries* [B, Q] are true for
    rows that are no negatives of a pair.
    """

    queries: Tensor
    documents: Tensor
    own: Tensor
    hides_documents: Tensor
    hides_queries: Tensor


def hidden_rows(texts: Texts, own: Tensor, *, hides_equal: bool) -> tuple[Tensor, Tensor]:
    """The masks [B, D] and [B, Q] of :class:`Candidates` for the pairs *own* [B]: padding, and equal texts.

    With *hides_equal*, pairs with equal queries or equal documents are no negatives of each other, and neither are
    other documents with the text of the pair's document. A pair's own query and document are never hidden.
    """
    num_pairs = len(texts.queries)
    hides_documents = (~texts.has_document).expand(len(own), -1).clone()
    hides_queries = (~texts.has_query).expand(len(own), -1).clone()
    if hides_equal:
        has_text = texts.documents[own].unsqueeze(1) == texts.documents
        is_equal = texts.queries[own].unsqueeze(1) == texts.queries
        is_equal |= has_text[:, :num_pairs]
        hides_queries |= is_equal
        hides_documents |= has_text
        hides_documents[:, :num_pairs] |= is_equal
    rows = torch.arange(len(own), device=own.device)
    hides_documents[rows, own] = False
    hides_queries[rows, own] = False
    return hides_documents, hides_queries


def contrastive_losses(
    candidates: Candidates, *, temperature: float, symmetric: bool = False
) -> tuple[Tensor, Tensor]:
    """The loss [B] of each of this rank's pairs, and the rank [B] of its document (:func:`ranks_of`).

    The loss is the cross-entropy over dot products divided by *temperature*. With *symmetric*, it is the mean of that
    and of the loss in the other direction, in which the document of each pair has to find its query among all queries.
    """
    own = candidates.own
    scores = _scores(candidates) / temperature
    right = scores.gather(1, own.unsqueeze(1)).squeeze(1)
    total = _logsumexp(scores, candidates.hides_documents)
    if symmetric:
        reverse = candidates.documents[own] @ candidates.queries.T / temperature
        total = (total + _logsumexp(reverse, candidates.hides_queries)) / 2
    return total - right, _ranks(scores.detach(), candidates)


def ranks_of(candidates: Candidates) -> Tensor:
    """The rank [B], from 1, of the document of each of this rank's queries among all documents that are not hidden.

    An equal score counts as a better one, so that a model with the same embedding for every text is never right.
    """
    return _ranks(_scores(candidates), candidates)


def _scores(candidates: Candidates) -> Tensor:
    return candidates.queries[candidates.own] @ candidates.documents.T


def _logsumexp(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden, -torch.inf).logsumexp(dim=1)


def _ranks(scores: Tensor, candidates: Candidates) -> Tensor:
    is_as_good = scores >= scores.gather(1, candidates.own.unsqueeze(1))
    # The own document is among them.
    return (is_as_good & ~candidates.hides_documents).sum(dim=1)


def listwise_losses(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The loss [Q] of each list, and the rank [Q] of its first score, from 1.

    *scores* [R] has the lists one after another, *counts* [Q] the lengths of the lists. The loss is the
    cross-entropy of choosing the first one by a softmax over the list. An equal score counts as a better one, so that
    equal scores are never right.
    """
    # Computed where the counts are, on the host: a GPU would have to finish its work first, and again in the backward
    # pass of a mask.
    counts = counts.cpu()
    longest = int(counts.max()) if len(counts) else 1
    number = torch.arange(len(counts)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    position = torch.arange(len(number)) - first
    places = (number * longest + position).to(scores.device)
    empty = scores.new_full((len(counts) * longest,), -torch.inf)
    lists = empty.index_copy(0, places, scores).view(-1, longest)
    losses = lists.logsumexp(dim=1) - lists[:, 0]
    ranks = (lists.detach() >= lists.detach()[:, :1]).sum(dim=1)
    return losses, ranks
