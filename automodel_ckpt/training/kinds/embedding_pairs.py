"""The pairs of texts of all ranks: digests and embeddings of what each rank has, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_ckpt.data.collate import IGNORE_INDEX
from automodel_ckpt.loss.contrastive import Candidates, Texts, hidden_rows
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.gather import data_group, gather_parts
from automodel_ckpt.training.parts.objective import Tensors


@dataclass(frozen=True)
class Parts:
    """Something of each text of this rank: of the *queries* [B, ...], their *documents* [B, ...] and the further
    *negatives* [K, ...]."""

    queries: Tensor
    documents: Tensor
    negatives: Tensor

    @property
    def num_pairs(self) -> int:
        return len(self.queries)

    def padded(self, num_pairs: int, num_negatives: int) -> Tensor:
        """One tensor [2 x num_pairs + num_negatives, ...], in which zeros pad each part."""
        sizes = (num_pairs, num_pairs, num_negatives)
        parts = (self.queries, self.documents, self.negatives)
        padded = []
        for part, size in zip(parts, sizes, strict=True):
            num_missing = size - len(part)
            filler = part.new_zeros(num_missing, *part.shape[1:])
            padded += [part, filler]
        return torch.cat(padded)

    def to(self, device: torch.device) -> Parts:
        """The parts on *device*."""
        return Parts(self.queries.to(device), self.documents.to(device), self.negatives.to(device))

    @staticmethod
    def joined(parts: Sequence[Parts]) -> Parts:
        """The parts of several micro-batches as one."""
        return Parts(
            torch.cat([part.queries for part in parts]),
            torch.cat([part.documents for part in parts]),
            torch.cat([part.negatives for part in parts]),
        )


def num_pairs_of(micro_batch: Tensors) -> int:
    """The number of pairs of a micro-batch. 0 if it only keeps this rank in step with the others."""
    is_filler = not bool((micro_batch["labels"] != IGNORE_INDEX).any())
    return 0 if is_filler else len(micro_batch["num_negatives"])


def parts_of(values: Tensor, micro_batch: Tensors) -> Parts:
    """Divide *values* [texts, ...] of a micro-batch, or without rows if it only keeps this rank in step."""
    num_pairs = num_pairs_of(micro_batch)
    if num_pairs == 0:
        # A slice, so that a gradient still reaches the model: fsdp2 and ddp reduce it on all ranks.
        return Parts(values[:0], values[:0], values[:0])
    end = 2 * num_pairs
    return Parts(values[0:end:2], values[1:end:2], values[end:])


def own_candidates(
    micro_batches: Sequence[Tensors], digests: Parts, embeddings: Parts, *, hides_equal: bool
) -> Candidates:
    """The candidates for the pairs of this rank's *micro_batches*: for each pair only its own documents.

    *digests* and *embeddings* belong to the texts of the micro-batches. With *hides_equal*, a negative with the same
    text as the pair's document is not a candidate.
    """
    counts = [each["num_negatives"] for each in micro_batches if num_pairs_of(each)]
    pairs = torch.arange(digests.num_pairs)
    num_negatives = torch.cat([pairs[:0], *counts])
    owners = torch.cat([pairs, pairs.repeat_interleave(num_negatives)])
    documents = torch.cat([digests.documents, digests.negatives])
    is_there = torch.ones_like(owners, dtype=torch.bool)
    texts = Texts(digests.queries, documents, is_there[: len(pairs)], is_there)
    values = torch.cat([embeddings.documents, embeddings.negatives])
    found = Embedded(texts, embeddings.queries, values).candidates(pairs, hides_equal=hides_equal)
    is_of_other = owners != pairs.unsqueeze(1)
    found.hides_documents.logical_or_(is_of_other.to(found.hides_documents.device))
    return found


@dataclass(frozen=True)
class Embedded:
    """The *texts* of all ranks, and the embeddings of their *queries* [Q, H] and *documents* [D, H]."""

    texts: Texts
    queries: Tensor
    documents: Tensor

    def candidates(self, own: Tensor, *, hides_equal: bool) -> Candidates:
        """The candidates for the pairs *own* [B]. With *hides_equal*, equal texts are not negatives."""
        hides_documents, hides_queries = hidden_rows(self.texts, own, hides_equal=hides_equal)
        device = self.queries.device
        return Candidates(
            self.queries,
            self.documents,
            own.to(device),
            hides_documents.to(device),
            hides_queries.to(device),
        )


class PairsOverRanks:
    """Exchanges digests and embeddings among the ranks with other parts of each global batch."""

    def __init__(self, layout: RankLayout) -> None:
        """A collective: every rank creates one."""
        self._layout = layout
        self._group = data_group(layout)

    def gather(self, digests: Parts, embeddings: Parts) -> tuple[Embedded, Tensor]:
        """Gather the *digests*, on the host, and the *embeddings* [n, H], with gradients, of all ranks' texts.

        Also returns the numbers of the pairs that are this rank's. A collective.
        """
        counts = self._on_host(torch.tensor([digests.num_pairs, len(digests.negatives)]))
        num_pairs, num_negatives = counts.amax(dim=0).tolist()
        gathered = self._on_host(digests.padded(num_pairs, num_negatives))
        has_pair = torch.arange(num_pairs) < counts[:, :1]
        has_negative = torch.arange(num_negatives) < counts[:, 1:]
        has_query = has_pair.flatten()
        has_document = torch.cat([has_query, has_negative.flatten()])
        texts = Texts(*_divided(gathered, num_pairs), has_query, has_document)
        first = self._layout.dp_rank * num_pairs
        own = torch.arange(first, first + digests.num_pairs)
        values = gather_parts(embeddings.padded(num_pairs, num_negatives), self._group)
        return Embedded(texts, *_divided(values, num_pairs)), own

    def _on_host(self, values: Tensor) -> Tensor:
        """Stack *values* of equal shape of the ranks with other parts of the data: [ranks, ...]. A collective."""
        if self._group is None:
            return values.unsqueeze(0)
        parts = [torch.empty_like(values) for _ in range(self._layout.world_size)]
        dist.all_gather(parts, values, group=self._layout.gloo_group)
        sizes = self._layout.sizes
        # Ranks of a tensor parallel group, which are neighbors, have the same texts.
        return torch.stack(parts[:: sizes.tp * sizes.cp])


def _divided(gathered: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """The queries [Q, ...] and the documents [D, ...] in padded parts [ranks, n, ...]: document i < Q is of query i."""
    num_negatives = gathered.shape[1] - 2 * num_pairs
    parts = torch.split(gathered, [num_pairs, num_pairs, num_negatives], dim=1)
    queries, documents, negatives = (part.flatten(0, 1) for part in parts)
    return queries, torch.cat([documents, negatives])
