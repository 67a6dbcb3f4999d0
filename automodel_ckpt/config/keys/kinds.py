"""Sections that only some recipes read: one for each kind of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_1,
    FINITE,
    FRACTION,
    MISSING,
    NOT_EMPTY,
    POSITIVE,
    Condition,
    Relation,
    Rule,
    Target,
    excludes,
    needs,
    setting,
)

LABEL_NAMES = Rule(
    lambda names: len(set(names)) == len(names) and all(names),
    "a list of names that are different and not empty",
)


@dataclass
class ClassificationConfig:
    """Labels that the recipe sequence_classification assigns to texts."""

    labels: list[str] = field(default_factory=list, metadata={"rules": (LABEL_NAMES,)})
    """Names of the labels, in the order of the model's outputs; empty: LABEL_0, LABEL_1, ... for num_labels, otherwise
    the pretrained classifier's."""
    num_labels: int | None = field(default=None, metadata={"rules": (AT_LEAST_1,)})
    """Number of labels without names, or of the numbers that a regression predicts (null: 1)."""
    problem: Literal["single_label", "multi_label", "regression"] = "single_label"
    """single_label: each text has one label (cross-entropy); multi_label: any number of labels (binary cross-entropy of
    each); regression: numbers (mean squared error)."""

    relations: ClassVar[tuple[Relation, ...]] = (
        excludes(
            "num_labels",
            "labels",
            "labels and num_labels cannot be combined",
            "remove num_labels: it is the number of labels",
        ),
        Relation(
            ("num_labels", "labels", "problem"),
            lambda section: (
                section.problem != "single_label"
                or (section.num_labels or len(section.labels) or 2) > 1
            ),
            "a text that has one of a single label needs no model",
            "give at least 2 labels; set problem: multi_label for a label that a text may have or not, or "
            "problem: regression for a number",
        ),
    )


@dataclass
class TeacherConfig:
    """The student learns the predictions of this model. It is not trained and not saved."""

    from_pretrained: str = setting(MISSING, NOT_EMPTY)
    """Directory or Hub name of a pretrained Hugging Face model with the tokenizer of the student, and for vlm_distill
    with the same settings of images."""
    revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in from_pretrained; null: the main branch."""
    trust_remote_code: bool = False
    """Allow the model's repository to supply its code, for types that transformers does not include. Has an effect only
    with --trust trust_remote_code on the command line."""
    dtype: Literal["float32", "bfloat16", "float16", "float64", "auto"] | None = None
    """Data type of the parameters; auto: the type in the model's config.json; null: 16 bits on a GPU, else float32."""
    attn_implementation: str | None = None
    """Attention implementation: eager, sdpa, flash_attention_2, ...; null lets transformers choose."""


@dataclass
class DistillConfig:
    """Knowledge distillation: the model (the student) learns to predict what a teacher predicts.

    The loss of a label is (1 - kd_ratio) * cross-entropy + kd_ratio * temperature**2 * divergence.
    """

    teacher: TeacherConfig | Target = field(default_factory=TeacherConfig)
    """The model with the predictions to learn: a directory or Hub name, or a plug-in with _target_."""
    divergence: Literal["forward_kl", "reverse_kl", "mixed"] = "forward_kl"
    """What the student minimizes: forward_kl is KL(teacher || student), reverse_kl is KL(student || teacher), mixed is
    a weighted mean of both."""
    reverse_weight: float = setting(0.5, FRACTION)
    """Weight of the reverse divergence in divergence: mixed; the forward one has the rest."""
    kd_ratio: float = setting(0.5, FRACTION)
    """Share of the divergence in the loss; 0: cross-entropy alone, 1: no cross-entropy."""
    temperature: float = setting(1.0, POSITIVE)
    """Both models' logits are divided by it before the softmax of the divergence. Above 1, less probable tokens count
    more."""
    offload_teacher: bool = False
    """Keep the teacher's weights in the memory of the host while they are not used; without a GPU, no effect."""
    top_k: int | None = setting(None, AT_LEAST_1)
    """Compute the teacher's k most probable tokens for all data before training and keep them in a cache; later starts
    do not load the teacher. null: complete logits, computed in each step."""
    cache_dir: str | None = setting(None, NOT_EMPTY)
    """Directory of these caches, which all nodes can read; null: $AUTOMODEL_CKPT_CACHE if set, else
    ~/.cache/automodel_ckpt."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("reverse_weight",),
            ("divergence",),
            lambda section: section.divergence == "mixed",
            "only divergence: mixed has two weights",
            "set divergence: mixed, or remove the key",
        ),
        needs(
            "cache_dir",
            "top_k",
            "without top_k, nothing is cached",
            "set distill.top_k, or remove cache_dir",
        ),
    )


_BELOW_HALF = Rule(lambda number: 0 <= number < 0.5, "from 0 to below 0.5")


@dataclass
class DPOConfig:
    """Training on preferred and rejected answers, in comparison with a reference model (DPO, arXiv:2305.18290)."""

    beta: float = setting(0.1, POSITIVE)
    """How strongly the policy is kept near the reference model. With loss ipo, the tau of its paper."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss of a pair: DPO's (sigmoid), IPO's (arXiv:2310.12036, over mean log-probabilities of tokens), of SLiC
    (hinge, arXiv:2309.06657), or of robust DPO (robust, arXiv:2403.00409)."""
    label_smoothing: float = setting(0.0, _BELOW_HALF)
    """Probability that a preference is wrong, for the losses sigmoid and robust."""
    reference: str | None = setting(None, NOT_EMPTY)
    """Directory or Hub name of the reference model; null: the model that training starts from, with peft its base."""
    reference_revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in reference; null: the main branch."""
    precompute: bool = False
    """Compute the reference's log-probabilities of all pairs at each start. The reference is then not in
    memory during training."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("label_smoothing",),
            ("loss",),
            lambda dpo: dpo.loss in ("sigmoid", "robust"),
            "only the losses sigmoid and robust have it",
            "remove label_smoothing, or set loss sigmoid or robust",
        ),
        needs(
            "reference_revision",
            "reference",
            "without a name, the reference has the revision of the model",
            "set dpo.reference, or remove the key",
        ),
    )


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
    """Average the loss with the loss of finding the query of each document among all queries."""
    negatives: Literal["global_batch", "micro_batch", "own"] = "global_batch"
    """Whose texts are the negatives of a pair. global_batch: all texts of the global batch, so that the loss depends
    neither on accumulation nor on the number of ranks; accumulation then costs a second forward pass. micro_batch:
    the texts of one micro-batch of each rank. own: only the negatives in the row of the pair."""
    hide_equal_texts: bool = True
    """Pairs with an equal query or document are not negatives of each other."""
    query_prompt: str = ""
    """Text before each query, in training and in the export."""
    document_prompt: str = ""
    """Text before each document, in training and in the export."""


@dataclass
class KTOConfig:
    """Training on completions that are judged one by one (KTO, arXiv:2402.01306)."""

    beta: float = setting(0.1, POSITIVE)
    """How strongly the policy is kept near the reference model."""
    desirable_weight: float = setting(1.0, FINITE)
    """Factor of the loss of desirable completions."""
    undesirable_weight: float = setting(1.0, FINITE)
    """Factor of the loss of undesirable completions."""
    reference: str | None = setting(None, NOT_EMPTY)
    """Directory or Hub name of the reference model; null: the model that training starts from, with peft its base."""
    reference_revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in reference; null: the main branch."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("desirable_weight", "undesirable_weight"),
            lambda kto: kto.desirable_weight > 0 or kto.undesirable_weight > 0,
            "with both weights 0, the loss is 0 and nothing is trained",
            "set one of them to more than 0, such as the default 1.0",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        needs(
            "reference_revision",
            "reference",
            "without a name, the reference has the revision of the model",
            "set kto.reference, or remove the key",
        ),
    )


@dataclass
class ORPOConfig:
    """Fine-tuning on preferred answers, with a penalty for rejected ones (ORPO, arXiv:2403.07691)."""

    beta: float = setting(0.1, POSITIVE)
    """Weight of the odds ratio of both answers, in addition to the loss of the preferred one."""
    learn_prompt: bool = True
    """Include the prompt of the preferred answer in its loss, as the authors of ORPO and TRL do."""


@dataclass
class PretrainConfig:
    """Pretraining: how rows divide documents, the z-loss, and learning rates by width. Rows: packed_sequence."""

    split_documents: bool = False
    """Let a document continue in the next row, so that all rows are full; false: no document is in two rows."""
    attend_across_documents: bool = False
    """Let attention and labels cross from a document to the next one in its row; false: each sees only itself."""
    z_loss: float | None = setting(None, POSITIVE)
    """Coefficient of the z-loss, the square of logsumexp(logits) of each label; usual: 1e-4; null: none. It is a metric
    next to the loss in training.jsonl."""
    base_width: int | None = setting(None, AT_LEAST_1)
    """Hidden size for which optimizer.lr and the config's initializer_range are meant. Other widths scale the learning
    rates and initial values of hidden matrices and the output layer; null: no scaling."""


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


@dataclass
class RewardModelConfig:
    """Training a model that scores texts, on preferred and rejected answers (Bradley-Terry, arXiv:2203.02155)."""

    center_coefficient: float = setting(0.0, FINITE)
    """Factor of the squared sum of both scores of a pair, which keeps scores around 0 (arXiv:2312.09244); 0: none."""
