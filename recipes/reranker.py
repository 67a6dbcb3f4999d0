"""Training a reranker (cross-encoder): a model that reads a query together with a document, and scores the pair.

The model is one of transformers' ``AutoModelForSequenceClassification`` with one label. The document that answers a
query has to get the highest score among the documents of its row: the loss is the cross-entropy of choosing it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.kinds import RerankerConfig
from automodel_ckpt.config.recipe_rules import WITH_HEAD
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.text_pairs import ScoreCollator, check_negatives, has_types
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.loss.causal import IGNORE_INDEX
from automodel_ckpt.loss.ranking import listwise_losses
from automodel_ckpt.models.inspect.interface import text_inputs
from automodel_ckpt.models.task_head import SEQUENCE_CLASSIFICATION, set_one_score
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.kinds.embedding import BothWays, misplaced_in_data
from automodel_ckpt.training.model.sections import row_multiple
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import BatchSize, LossSum


class Listwise(Objective):
    """The cross-entropy of choosing the first document of each query by its score."""

    terms = "queries"
    measures = ("accuracy", "mrr")
    section: RerankerConfig

    def size_of(self, micro_batch: Tensors) -> BatchSize:
        num_queries = len(_counts_of(micro_batch))
        num_tokens = int(micro_batch["attention_mask"].sum()) if num_queries else 0
        return BatchSize(num_queries, 0, num_tokens)

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the summed loss of the queries in *micro_batch*, and the ranks of their documents."""
        self.check_length(micro_batch["input_ids"].shape[1])
        rows = text_inputs(self.model, micro_batch)
        scores = self.logits(rows).squeeze(-1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        counts = _counts_of(micro_batch)
        # A slice, so that a gradient still reaches the model where the rows only keep this rank in step.
        scores = scores[: int(counts.sum())] / self.section.temperature
        losses, ranks = listwise_losses(scores, counts)
        metrics = {"accuracy": (ranks == 1).sum(), "mrr": ranks.double().reciprocal().sum()}
        return LossSum(losses.sum(), metrics)


def _counts_of(micro_batch: Tensors) -> torch.Tensor:
    """The number of documents of each query of a micro-batch. Empty if it only keeps this rank in step."""
    counts: torch.Tensor = micro_batch["num_documents"]
    is_filler = not bool((micro_batch["labels"] != IGNORE_INDEX).any())
    return counts[:0] if is_filler else counts


class Reranker(BothWays, LLMFinetune):
    """Trains ``model`` to give the right document of a query in ``dataset`` a higher score than the others."""

    auto_class = AutoModelForSequenceClassification
    task_type = SEQUENCE_CLASSIFICATION
    shares_rows = False
    sample_noun = "list"
    unsupported = WITH_HEAD
    objective_class = Listwise

    section_key, section_class = "reranker", RerankerConfig

    def config_problems(self) -> list[Problem]:
        what = "the template is part of the recipe, and all of its data have the same"
        misplaced = misplaced_in_data(self.config, ["pair_template"], what, "reranker.")
        return [*super().config_problems(), *misplaced]

    def build_model_config(self) -> PreTrainedConfig | None:
        """Read the configuration of the model, and give it one label, the padding token, and the attention."""
        config = super().build_model_config()
        assert config is not None  # a model by _target_ is not supported
        set_one_score(config, self.tokenizer)
        return config

    def build_dataset(self, section: Target) -> Any:
        template = self.section.template
        names = ("query", "document")
        if template is not None and not all(name in template for name in names):
            raise RecipeError(
                "the template has no place for the query or for the document",
                where="reranker.template",
                value=template,
                hint='write both, such as "question: {{ query }} passage: {{ document }}"',
            )
        dataset = build(section, tokenizer=self.tokenizer, pair_template=template or "")
        if self.config.dataloader.collate_fn is None:
            check_negatives(
                dataset, has_types=self._has_types, where=f"_target_: {section._target_}"
            )
        return dataset

    def samples_of_rows(self, micro_batch: Tensors) -> list[int]:
        """List the number of the query, in *micro_batch*, of each of its rows."""
        counts = micro_batch["num_documents"]
        queries: list[int] = torch.arange(len(counts)).repeat_interleave(counts).tolist()
        return queries

    def labels_in_words(self, micro_batch: Tensors) -> list[str]:
        """Describe each row: the right document of its query, or another one."""
        words = []
        for count in micro_batch["num_documents"].tolist():
            words += ["right document", *["other document"] * (count - 1)]
        return words

    def usual_collate_fn(self) -> Any:
        """Build a collator that pads to the longest text."""
        assert self.model_config is not None
        pad_token_id: Any = self.model_config.get_text_config().pad_token_id
        multiple = row_multiple(self.config, self.layout)
        return ScoreCollator(pad_token_id, multiple, has_types=self._has_types)

    @property
    def _has_types(self) -> bool:
        """Whether samples distinguish the query's tokens from the document's tokens."""
        template = self.section.template or ""
        return self.tokenizer is not None and has_types(self.tokenizer, template)
