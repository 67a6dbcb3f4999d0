"""Contrastive training of text embeddings: each query has to find its document among the other pairs' documents.

The model is one of transformers' ``AutoModel``, an encoder or a decoder, without an output layer. The embedding of a
text is pooled from its hidden states (section ``embedding``), and only the model has weights to save. Exports also have
the files with which sentence-transformers computes the same embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.kinds import EmbeddingConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.text_pairs import PairCollator
from automodel_ckpt.errors import Problem
from automodel_ckpt.loss.ranking import contrastive_losses, ranks_of
from automodel_ckpt.models.loss.pooling import hidden_states_of, pool
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.kinds.embedding import (
    UNSUPPORTED,
    BothWays,
    PairsOverRanks,
    Parts,
    check_architecture,
    misplaced_in_data,
    num_pairs_of,
    own_candidates,
    parts_of,
    sentence_transformers_files,
    with_backbone,
)
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import BatchSize, EvaluationSums, LossSum

_RANKED_TOGETHER = 512
"""The number of queries of this rank that are ranked together among all documents of a validation set."""


class Contrastive(Objective):
    """The contrastive loss of pairs. Their negatives are the texts of all ranks, or only the texts of their rows.

    With ``embedding.negatives: global_batch``, these are the texts of all micro-batches, too: their embeddings are
    computed twice, first without gradients for the loss, then for the backward pass (arXiv:2101.06983).
    """

    terms = "pairs"
    measures = ("accuracy", "mrr", "recall_at_10")
    section: EmbeddingConfig
    over_ranks: PairsOverRanks
    rng: StatefulRNG

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._known: list[tuple[Tensor, LossSum]] = []
        """The gradient of the embeddings, and the loss, of each micro-batch that :meth:`loss` has yet to compute."""
        self._seen: list[tuple[Parts, Parts]] = []
        """The digests and embeddings of the texts of a validation set, on the host."""

    def size_of(self, micro_batch: Tensors) -> BatchSize:
        num_pairs = num_pairs_of(micro_batch)
        num_tokens = int(micro_batch["attention_mask"].sum()) if num_pairs else 0
        return BatchSize(num_pairs, num_tokens, num_tokens)

    def embed(self, micro_batch: Tensors) -> Tensor:
        """The embeddings [N, H] of all texts of *micro_batch*, in float32."""
        rows = self.rows_of(micro_batch)
        inputs = {name: self._on_device(rows[name]) for name in ("input_ids", "attention_mask")}
        hidden = hidden_states_of(self.trainable.forward(inputs))
        section = self.section
        return pool(hidden, inputs["attention_mask"], section.pooling, normalize=section.normalize)

    # ---------------------------------------------------------------- training

    def start_batch(self, micro_batches: Sequence[Tensors]) -> None:
        """Compute the loss of all *micro_batches* of a step, and its gradient by their embeddings."""
        self._known = []
        needs_others = self.section.negatives == "global_batch" and len(micro_batches) > 1
        if not needs_others or not self.model.training:
            return
        # The backward passes must draw the same random numbers: dropout would change the embeddings.
        with torch.no_grad(), self.rng.preserved():
            embeddings = [self.embed(micro_batch) for micro_batch in micro_batches]
        for each in embeddings:
            each.requires_grad_()
        losses, ranks = self._losses(micro_batches, embeddings)
        gradients = torch.autograd.grad(losses.sum(), embeddings)
        sizes = [num_pairs_of(micro_batch) for micro_batch in micro_batches]
        own_losses, own_ranks = torch.split(losses.detach(), sizes), torch.split(ranks, sizes)
        for gradient, *values in zip(gradients, own_losses, own_ranks, strict=True):
            self._known.append((gradient, _summed(*values)))

    def loss(self, micro_batch: Tensors) -> LossSum:
        embeddings = self.embed(micro_batch)
        if not self._known:
            return _summed(*self._losses([micro_batch], [embeddings]))
        (gradient, result), *self._known = self._known
        product = (embeddings * gradient).sum()
        # The value of the loss, with the gradient of the product.
        loss = result.loss + (product - product.detach())
        return LossSum(loss, result.metrics)

    def _losses(
        self, micro_batches: Sequence[Tensors], embeddings: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The loss [B] and the rank [B] of each pair of *micro_batches* among its candidates. A collective."""
        section = self.section
        digests, values = _own_parts(micro_batches, embeddings)
        hides_equal = section.hide_equal_texts
        if section.negatives == "own":
            candidates = own_candidates(micro_batches, digests, values, hides_equal=hides_equal)
        else:
            embedded, own = self.over_ranks.gather(digests, values)
            candidates = embedded.candidates(own, hides_equal=hides_equal)
        return contrastive_losses(
            candidates, temperature=section.temperature, symmetric=section.symmetric
        )

    # ---------------------------------------------------------------- validation

    def losses(self, micro_batches: Sequence[Tensors]) -> Iterable[Tensor]:
        """Compute the summed loss of *micro_batches*, which are a global batch, also with ``negatives: micro_batch``.

        So the metrics of a validation do not depend on the number of ranks.
        """
        # The loop ends a set with a batch without micro-batches.
        if not micro_batches:
            return []
        embeddings = [self.embed(micro_batch) for micro_batch in micro_batches]
        result = _summed(*self._losses(micro_batches, embeddings))
        assert self.evaluation is not None
        for name, value in result.metrics.items():
            self.evaluation.add(name, value)
        self._seen.append(_own_parts(micro_batches, [each.cpu() for each in embeddings]))
        return [result.loss]

    @contextmanager
    def evaluating(self) -> Iterator[EvaluationSums]:
        """Add up the metrics of a validation set. At its end, rank each document among all documents of the set."""
        self._seen = []
        with super().evaluating() as sums:
            yield sums
            if self._seen:
                self._rank_whole_set(sums)
        self._seen = []

    def _rank_whole_set(self, sums: EvaluationSums) -> None:
        digests, embeddings = map(Parts.joined, zip(*self._seen, strict=True))
        embedded, own = self.over_ranks.gather(digests, embeddings.to(self.layout.device))
        for some in torch.split(own, _RANKED_TOGETHER):
            candidates = embedded.candidates(some, hides_equal=True)
            ranks = ranks_of(candidates).double()
            sums.add("mrr", ranks.reciprocal().sum())
            sums.add("recall_at_10", (ranks <= 10).sum())


def _own_parts(
    micro_batches: Sequence[Tensors], embeddings: Sequence[Tensor]
) -> tuple[Parts, Parts]:
    """The digests and the *embeddings* of the texts of this rank's *micro_batches*."""
    digests, values = [], []
    for micro_batch, each in zip(micro_batches, embeddings, strict=True):
        digests.append(parts_of(micro_batch["digests"], micro_batch))
        values.append(parts_of(each, micro_batch))
    return Parts.joined(digests), Parts.joined(values)


def _summed(losses: Tensor, ranks: Tensor) -> LossSum:
    return LossSum(losses.sum(), {"accuracy": (ranks == 1).sum()})


class EmbeddingFinetune(BothWays, LLMFinetune):
    """Trains the embeddings of a model on the pairs of ``dataset``."""

    auto_class = AutoModel
    task_type = "FEATURE_EXTRACTION"
    shares_rows = False
    sample_noun = "pair"
    rows_per_sample = 2
    unsupported = UNSUPPORTED
    objective_class = Contrastive

    section_key, section_class = "embedding", EmbeddingConfig

    def config_problems(self) -> list[Problem]:
        names, what = ("query_prompt", "document_prompt"), "prompts are part of the model"
        misplaced = misplaced_in_data(self.config, names, what, "embedding.")
        return [*super().config_problems(), *misplaced]

    def build_dataset(self, section: Target) -> Any:
        return build(
            section,
            tokenizer=self.tokenizer,
            query_prompt=self.section.query_prompt,
            document_prompt=self.section.document_prompt,
        )

    def usual_collate_fn(self) -> Any:
        """Build a collator of pairs that pads to the longest text."""
        padding = super().usual_collate_fn()
        return PairCollator(padding.pad_token_id, padding.multiple)

    def samples_of_rows(self, micro_batch: Tensors) -> list[int]:
        """List the number of the pair, in *micro_batch*, of each of its texts: the pairs, then all negatives."""
        counts = micro_batch["num_negatives"]
        pairs = torch.arange(len(counts))
        owners = torch.cat([pairs.repeat_interleave(2), pairs.repeat_interleave(counts)])
        numbers: list[int] = owners.tolist()
        return numbers

    def validation_batch_size(self) -> int:
        """The global batch size of training: each validation then ranks the same documents on any number of ranks."""
        return self.config.step_scheduler.global_batch_size

    def build_model_config(self) -> PreTrainedConfig | None:
        config: PreTrainedConfig | None = super().build_model_config()
        check_architecture(config)
        return config

    def build_trainable(self, *arguments: Any, **keywords: Any) -> Any:
        self.config = with_backbone(self.config, self.model_config)
        return super().build_trainable(*arguments, **keywords)

    def build_objective(self) -> Objective:
        objective = super().build_objective()
        assert isinstance(objective, Contrastive)
        objective.rng = self.rng
        objective.over_ranks = PairsOverRanks(self.layout)
        return objective

    def export_files(self) -> Mapping[str, bytes]:
        return sentence_transformers_files(self.section, self.config.dataset, self.model_config)
