"""The keys of a recipe file, as one dataclass. Its fields are the sections in ``keys/``.

The dataclasses are omegaconf structured configs. ``--help`` prints the string below each field. A field's :class:`Rule`
and a section's :class:`Relation` and :class:`Condition` restrict the values of the right type; ``recipe_rules.py`` has
those between sections. None of these modules needs more than the standard library.

Custom recipes import the sections and the rules of fields from here (``__all__``), in whichever module they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from automodel_ckpt.config.keys.checkpoint import (
    CheckpointConfig,
    HubConfig,
    MemoryConfig,
    RemoteConfig,
)
from automodel_ckpt.config.keys.data import (
    SET_NAMES,
    DataloaderConfig,
    PackedSequenceConfig,
    ProcessorConfig,
    TokenizerConfig,
)
from automodel_ckpt.config.keys.kinds import (
    ClassificationConfig,
    DistillConfig,
    DPOConfig,
    EmbeddingConfig,
    KTOConfig,
    ORPOConfig,
    PretrainConfig,
    RerankerConfig,
    RewardModelConfig,
)
from automodel_ckpt.config.keys.model import (
    CompileConfig,
    Fp8Config,
    InitFromConfig,
    InitFromSource,
    ModelConfig,
    MtpConfig,
    PeftConfig,
    QatConfig,
)
from automodel_ckpt.config.keys.monitoring import (
    EvaluationConfig,
    GenerationConfig,
    HangsConfig,
    LoggingConfig,
    ProfileConfig,
)
from automodel_ckpt.config.keys.optimizer import (
    EmaConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    OptimizerGroup,
    OptimizerTarget,
    OptionsGroup,
    TargetGroup,
)
from automodel_ckpt.config.keys.ranks_and_steps import (
    DistributedConfig,
    EarlyStoppingConfig,
    MeshSizes,
    OnSpikeConfig,
    StepSchedulerConfig,
)
from automodel_ckpt.config.recipe_rules import CONDITIONS, RELATIONS
from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_1_OR_AUTO,
    AT_LEAST_2,
    BELOW_1,
    BETAS,
    FINITE,
    FRACTION,
    MISSING,
    NOT_EMPTY,
    POSITIVE,
    SEED,
    UP_TO_2,
    WAIT,
    Condition,
    Relation,
    Rule,
    Target,
    setting,
)

__all__ = [
    "AT_LEAST_0",
    "AT_LEAST_1",
    "AT_LEAST_1_OR_AUTO",
    "AT_LEAST_2",
    "BELOW_1",
    "BETAS",
    "FINITE",
    "FRACTION",
    "MISSING",
    "NOT_EMPTY",
    "POSITIVE",
    "SEED",
    "UP_TO_2",
    "WAIT",
    "CheckpointConfig",
    "ClassificationConfig",
    "CompileConfig",
    "Condition",
    "DPOConfig",
    "DataloaderConfig",
    "DistillConfig",
    "DistributedConfig",
    "EarlyStoppingConfig",
    "EmaConfig",
    "EmbeddingConfig",
    "EvaluationConfig",
    "Fp8Config",
    "GenerationConfig",
    "HangsConfig",
    "HubConfig",
    "InitFromConfig",
    "InitFromSource",
    "KTOConfig",
    "LRSchedulerConfig",
    "LoggingConfig",
    "MemoryConfig",
    "MeshSizes",
    "ModelConfig",
    "MtpConfig",
    "ORPOConfig",
    "OnSpikeConfig",
    "OptimizerConfig",
    "OptimizerGroup",
    "OptimizerTarget",
    "OptionsGroup",
    "PackedSequenceConfig",
    "PeftConfig",
    "PretrainConfig",
    "ProcessorConfig",
    "ProfileConfig",
    "QatConfig",
    "RecipeConfig",
    "Relation",
    "RemoteConfig",
    "RewardModelConfig",
    "Rule",
    "StepSchedulerConfig",
    "Target",
    "TargetGroup",
    "TokenizerConfig",
    "setting",
]


@dataclass
class RecipeConfig:
    """A recipe file."""

    recipe: str = setting("llm_finetune", NOT_EMPTY)
    """Training recipe: a registered name, package.module.Class, or path/to/file.py:Class."""
    seed: int = setting(42, SEED)
    """Random seed for data order, dropout and weight initialization."""
    dropout: Literal["auto"] | bool = "auto"
    """Train with the dropout of the model's config and of peft.dropout; auto: in all recipes but dpo, kto, orpo and
    reward_model, where dropout is noise in the comparison of answers."""
    model: ModelConfig | Target = field(default_factory=ModelConfig)
    init_from: InitFromConfig | list[InitFromSource] | None = None
    tokenizer: TokenizerConfig | Target | None = field(default_factory=TokenizerConfig)
    processor: ProcessorConfig | Target = field(default_factory=ProcessorConfig)
    classification: ClassificationConfig | None = None
    peft: PeftConfig | None = None
    qat: QatConfig | None = None
    fp8: Fp8Config | None = None
    distill: DistillConfig | None = None
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    dataset: Target = field(
        default_factory=Target, metadata={"supplied": ("tokenizer", "processor", "labels")}
    )
    """Builder of the training data: a map-style or iterable dataset. Receives the tokenizer or the processor."""
    validation_dataset: Target | None = field(
        default=None, metadata={"supplied": ("tokenizer", "processor", "labels")}
    )
    """Builder of the validation data; null: no validation, unless validation_datasets has sets."""
    validation_datasets: dict[str, Target] = field(
        default_factory=dict,
        metadata={"supplied": ("tokenizer", "processor", "labels"), "rules": (SET_NAMES,)},
    )
    """Builders of further validation data by name. The loss of NAME is val_loss_NAME; val_loss belongs to
    validation_dataset, or without it to the first set here."""
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    kto: KTOConfig | None = None
    reward_model: RewardModelConfig | None = None
    dpo: DPOConfig | None = None
    orpo: ORPOConfig | None = None
    packed_sequence: PackedSequenceConfig | None = None
    pretrain: PretrainConfig | None = None
    embedding: EmbeddingConfig | None = None
    reranker: RerankerConfig | None = None
    optimizer: OptimizerConfig | OptimizerTarget = field(
        default_factory=OptimizerConfig, metadata={"supplied": ("params",)}
    )
    lr_scheduler: LRSchedulerConfig | Target | None = field(
        default=None, metadata={"supplied": ("optimizer",)}
    )
    loss_fn: Target | None = field(default=None, metadata={"supplied": ("reduction",)})
    """The loss, a function (logits, labels) that returns the sum over labels, or its builder; null: cross-entropy.
    The sum is divided by the label tokens of the global batch."""
    clip_grad_norm: float | None = setting(1.0, POSITIVE)
    """Maximum gradient norm; null: no clipping."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    deterministic: bool = False
    """Use deterministic algorithms, so that CUDA runs are reproducible."""
    float32_precision: Literal["highest", "high"] | None = None
    """Products of float32 matrices on a GPU: highest is exact, high uses TF32 (10 bits of mantissa); null: high, with
    deterministic: true highest."""
    step_scheduler: StepSchedulerConfig = field(default_factory=StepSchedulerConfig)
    ema: EmaConfig | None = None
    generation: GenerationConfig | None = None
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hub: HubConfig | None = None
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig | None = None
    hangs: HangsConfig | None = field(default_factory=HangsConfig)

    relations: ClassVar[tuple[Relation, ...]] = RELATIONS
    conditions: ClassVar[tuple[Condition, ...]] = CONDITIONS
