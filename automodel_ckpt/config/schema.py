"""What a recipe file may say: one dataclass per section, each field with its type, default, rule and one line of help.

The dataclasses are omegaconf structured configs. The line below a field is what ``--help`` prints. A field's
:class:`Rule` and a section's :class:`Relation` say which values of the right type are accepted. Only the standard
library is imported here.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

T = TypeVar("T")

MISSING = "???"  # omegaconf's mark of a value that has to be given


@dataclass(frozen=True)
class Rule:
    """A condition on one value that is not None; ``says`` completes the sentence "<key> must be ..."."""

    holds: Callable[[Any], bool]
    says: str


@dataclass(frozen=True)
class Relation:
    """A condition between several ``keys`` of one section, reported at the first of them that was given."""

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    says: str
    remedy: str


@dataclass(frozen=True)
class Condition:
    """What several ``keys`` of one section need to have an effect: where it does not hold, any other value than a
    key's default is an error at that key.

    ``on`` names the keys that ``holds`` looks at; ``says`` completes the sentence "<key> has no effect: ...".
    """

    keys: tuple[str, ...]
    on: tuple[str, ...]
    holds: Callable[[Any], bool]
    says: str
    remedy: str


AT_LEAST_0 = Rule(lambda number: number >= 0, "0 or more")
SEED = Rule(lambda number: 0 <= number < 2**63, "from 0 to 2^63 - 1")
AT_LEAST_1 = Rule(lambda number: number >= 1, "1 or more")
AT_LEAST_1_OR_AUTO = Rule(lambda value: value == "auto" or value >= 1, "1 or more, or auto")
POSITIVE = Rule(lambda number: 0 < number < math.inf, "more than 0")
WAIT = Rule(lambda minutes: 0.1 <= minutes <= 1e6, "from 0.1 to 1000000")
FINITE = Rule(lambda number: 0 <= number < math.inf, "0 or more, and finite")
FRACTION = Rule(lambda number: 0 <= number <= 1, "from 0 to 1")
BELOW_1 = Rule(lambda number: 0 <= number < 1, "from 0 to below 1")
BETAS = Rule(lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1")
NOT_EMPTY = Rule(bool, "not empty")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
KNOWN_TRACKERS = Rule(lambda trackers: set(trackers) <= set(TRACKERS), f"a section with {', '.join(TRACKERS)}")
OPTIONS = Rule(lambda given: all(isinstance(value, dict) for value in given.values()), "sections of options, as {}")
POSITIVE_OR_WORD = Rule(lambda size: isinstance(size, str) or size >= 1, "1 or more, or tokenizer")
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""The rest is taken by Python, torch or the system: what asks for a stop must not be their message to each other."""
KNOWN_SIGNALS = Rule(lambda names: set(names) <= set(STOP_SIGNALS), f"a list out of {', '.join(STOP_SIGNALS)}")
DURATION = Rule(lambda text: parse_duration(text) is not None, "a number of seconds above 0, or HH:MM:SS")


def setting(default: T, *rules: Rule) -> T:
    """A dataclass field whose values keep these rules."""
    return field(default=default, metadata={"rules": rules})


def parse_duration(text: str) -> float | None:
    """Seconds of ``90``, ``1.5``, ``MM:SS`` or ``HH:MM:SS``; None when the text is no positive duration."""
    if not re.fullmatch(r"(\d+:)?\d+:[0-5]\d|\d+(\.\d*)?([eE][+-]?\d+)?", text, re.ASCII):
        return None
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds if 0 < seconds < math.inf else None


@dataclass
class Target:
    """A plug-in: the dotted name of a callable, with keyword arguments beside it in the same section."""

    _target_: str = MISSING
    """Dotted name of a class or function on the list for this section (config/allowlist.py); any other: --trust."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The section's other keys, checked against the callable's signature."""

    takes_any: ClassVar[bool] = True
    """Whether the section may have keys that are no fields of its dataclass: they are collected in ``kwargs``."""


def own_keys(section: Any) -> list[str]:
    """The keys of a section that are fields of its dataclass, besides ``_target_`` and the collected ``kwargs``."""
    return [each.name for each in fields(section) if each.name not in ("_target_", "kwargs")]


@dataclass
class ModelConfig:
    """The model that is trained."""

    from_pretrained: str | None = None
    """Directory or Hub name of a Hugging Face model to start from."""
    from_config: dict[str, Any] | str | None = None
    """Start from fresh weights: a transformers config (a mapping with model_type) or a path to a config.json."""
    dtype: Literal["float32", "bfloat16", "float16", "float64", "auto"] = "float32"
    """Type of the parameters; auto takes what the model's files say."""
    attn_implementation: str | None = None
    """Attention of transformers: eager, sdpa, flash_attention_2, ...; null: its choice, on CPUs sample by sample."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that are not trained: vision_tower, projector, language_model, or globs as '*.embed_tokens.*'."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    router_aux_loss: Literal["global_batch", "micro_batch"] | bool = "global_batch"
    """Load balancing loss of a model with output_router_logits: over each global_batch or micro_batch; false: none."""

    vocab_size: Literal["tokenizer"] | int | None = setting(None, POSITIVE_OR_WORD)
    """Tokens that the model has room for: a number, or tokenizer for as many as that has; null: as it is."""
    new_tokens: Literal["mean", "init"] = "mean"
    """Embeddings that vocab_size adds: the mean of the others, or fresh ones."""
    allow_missing: list[str] = field(default_factory=list)
    """Weights that from_pretrained need not hold and that start untrained: glob patterns over their names."""
    allow_unexpected: list[str] = field(default_factory=list)
    """Weights of from_pretrained that the model need not have: glob patterns over their names."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("from_pretrained", "from_config"),
            lambda model: (model.from_pretrained is None) != (model.from_config is None),
            "exactly one of from_pretrained and from_config must be given",
            "name a model directory or Hub name in from_pretrained, or describe one in from_config",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("new_tokens",),
            ("vocab_size", "from_pretrained"),
            lambda model: model.vocab_size is not None and model.from_pretrained is not None,
            "only vocab_size adds embeddings, to a model that from_pretrained names",
            "set model.vocab_size, or remove new_tokens",
        ),
        Condition(
            ("allow_missing", "allow_unexpected"),
            ("from_pretrained",),
            lambda model: model.from_pretrained is not None,
            "no weights are read, because from_pretrained is not given",
            "remove it; weights of init_from have init_from.allow_missing and init_from.allow_unexpected",
        ),
    )


@dataclass
class InitFromConfig:
    """Weights that a new run starts from, instead of the model's own; a run that is resumed goes on with its own."""

    path: str = setting(MISSING, NOT_EMPTY)
    """A run directory, checkpoint or pointer (checkpoints/LATEST), or a Hugging Face directory or Hub name."""
    allow_missing: list[str] = field(default_factory=list)
    """Weights of this model that need not be there, and stay as built: glob patterns over their names."""
    allow_unexpected: list[str] = field(default_factory=list)
    """Weights there that this model need not have: glob patterns over their names."""


@dataclass
class CompileConfig:
    """torch.compile of each decoder layer; names of weights and checkpoints are the same with and without."""

    enabled: bool = False
    """Compile: the first steps take long, the others less time."""
    backend: str = setting("inductor", NOT_EMPTY)
    """What makes the kernels; inductor needs a C++ compiler or a GPU, aot_eager none."""
    mode: str | None = None
    """Preset of the backend, such as reduce-overhead or max-autotune; null: its default."""
    fullgraph: bool = False
    """Refuse a layer that cannot be compiled as a whole, instead of running parts of it as they are."""
    dynamic: bool | None = None
    """true: expect every length at once; false: compile each anew; null: after the second one."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("backend", "mode", "fullgraph", "dynamic"),
            ("enabled",),
            lambda section: section.enabled,
            "nothing is compiled, because compile.enabled is false",
            "set compile.enabled to true, or remove the key",
        ),
    )


@dataclass
class TokenizerConfig:
    """The tokenizer. tokenizer: null means none, for data that is tokenized already."""

    from_pretrained: str | None = None
    """Directory or Hub name of a tokenizer; null takes the model's own."""


@dataclass
class ProcessorConfig:
    """What prepares text and images for a vision-language model."""

    from_pretrained: str | None = None
    """Directory or Hub name of a processor; null takes the model's own."""


@dataclass
class PeftConfig:
    """Adapters (LoRA) on a frozen base, by the peft library. No section: the model itself is trained."""

    method: Literal["lora"] = "lora"
    """Kind of adapter."""
    r: int = setting(8, AT_LEAST_1)
    """Rank: the inner dimension of an adapter."""
    alpha: int = setting(16, AT_LEAST_1)
    """An adapter's output is multiplied by alpha / r; with use_rslora by alpha / sqrt(r)."""
    dropout: float = setting(0.0, BELOW_1)
    """Part of an adapter's inputs that is dropped in training."""
    target_modules: list[str] | str = "all-linear"
    """Layers that get an adapter: names (q_proj), globs over whole names (*.self_attn.*), or all-linear."""
    exclude_modules: list[str] = field(default_factory=list)
    """Layers that get none though target_modules says so, in the same way."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained and saved as a whole, in the same way, as lm_head."""
    use_dora: bool = False
    """DoRA: train the length of each weight column apart from its direction."""
    use_rslora: bool = False
    """rsLoRA: a scale that suits large ranks."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """First values of an adapter; with default and gaussian it changes nothing before the first step."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the base are trained too."""
    ensure_weight_tying: bool = True
    """Where the base ties its embedding to the output layer and one is trained as a whole, keep them tied; adapters on
    either need false."""
    dtype: Literal["float32", "base"] = "float32"
    """Type of the adapters; base: that of the base's weights."""
    base_dir: str | None = None
    """With model.from_config: the directory of the base, which the first start fills with fresh weights."""
    quantize_base: Literal["nf4", "fp4", "int8"] | None = None
    """Keep the frozen base in so few bits (QLoRA): needs a CUDA device and bitsandbytes."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("init", "r"),
            lambda peft: peft.init != "orthogonal" or peft.r % 2 == 0,
            "init orthogonal needs an even r",
            "make r even, or leave init out",
        ),
    )


@dataclass
class DistributedConfig:
    """How ranks share the work."""

    strategy: Literal["auto", "fsdp2", "ddp", "single"] = "auto"
    """Data parallel ranks: fsdp2 shards the model, ddp copies it; auto: single for one of them, fsdp2 for more."""
    dp_size: int | None = setting(None, AT_LEAST_1)
    """Parts that each global batch is cut into; null: as many as the other sizes leave ranks for."""
    dp_replicate_size: int = setting(1, AT_LEAST_1)
    """fsdp2: copies of the sharded model, each sharded over dp_size / dp_replicate_size ranks (above 1: HSDP)."""
    tp_size: int = setting(1, AT_LEAST_1)
    """Tensor parallel ranks, which cut each layer's matrices and heads by the model's own plan."""
    tp_plan: Target | None = field(default=None, metadata={"supplied": ("model",)})
    """Builder of another plan: a mapping of module names (* for a layer's number) to styles; gets the model."""
    sequence_parallel: bool = False
    """With tp_size: also cut what lies between the matrices, along the sequence (models built like Llama and Qwen)."""
    pp_size: int = setting(1, AT_LEAST_1)
    """Pipeline stages, each of which has some of the layers (models built like Llama and Qwen)."""
    pp_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """With pp_size: 1f1b alternates forward and backward passes; gpipe makes all forward passes first."""
    cp_size: int = setting(1, AT_LEAST_1)
    """Context parallel ranks, which cut each row along the sequence and share out the heads of attention."""
    backend: str | None = None
    """torch.distributed backend; null: nccl with GPUs, else gloo."""
    timeout_minutes: float = setting(30.0, WAIT)
    """How long a collective may wait for the slowest rank, from 0.1 to a million."""
    reshard_after_forward: bool = True
    """fsdp2: free gathered parameters between forward and backward (less memory, more traffic)."""
    cpu_offload: bool = False
    """fsdp2 with GPUs: keep parameters, gradients and optimizer state in host memory between their uses."""
    mixed_precision: Literal["bfloat16", "float16"] | None = None
    """Compute in this type on any number of ranks; weights, gradients' sums and optimizer keep model.dtype."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("mixed_precision",),
            lambda ranks: ranks.mixed_precision != "float16",
            "float16 needs a loss scaler, without which small gradients vanish; there is none here",
            "set it to bfloat16, which has float32's range, or leave it out",
        ),
        Relation(
            ("sequence_parallel", "tp_plan"),
            lambda ranks: ranks.tp_size > 1 or not (ranks.sequence_parallel or ranks.tp_plan),
            "sequence_parallel and tp_plan say how tensor parallel ranks share a layer, and there is one",
            "set tp_size above 1, or leave them out",
        ),
        Relation(
            ("pp_size", "sequence_parallel"),
            lambda ranks: ranks.pp_size == 1 or not ranks.sequence_parallel,
            "pipeline stages exchange whole rows, and sequence_parallel cuts them",
            "leave sequence_parallel out: tp_size works with stages without it",
        ),
        Relation(
            ("pp_size", "cp_size"),
            lambda ranks: ranks.pp_size == 1 or ranks.cp_size == 1,
            "pipeline stages exchange whole rows, and context parallelism cuts them",
            "leave one of them out",
        ),
        Relation(
            ("pp_schedule", "pp_size"),
            lambda ranks: ranks.pp_size > 1 or ranks.pp_schedule == "1f1b",
            "pp_schedule is the order of passes in a pipeline, and there is none",
            "set pp_size above 1, or leave pp_schedule out",
        ),
        Relation(
            ("cpu_offload", "backend"),
            lambda ranks: not ranks.cpu_offload or ranks.backend in (None, "gloo") or "cpu:" in ranks.backend,
            "with cpu_offload the ranks sum numbers in host memory too, for which this backend has no way",
            "leave backend out, or set it to cpu:gloo,cuda:nccl",
        ),
        Relation(
            ("cp_size", "sequence_parallel"),
            lambda ranks: ranks.cp_size == 1 or not ranks.sequence_parallel,
            "cp_size and sequence_parallel exclude each other: both cut rows along the sequence",
            "leave sequence_parallel out",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("reshard_after_forward",),
            ("strategy",),
            lambda ranks: ranks.strategy in ("auto", "fsdp2"),
            "only fsdp2 shards parameters",
            "set distributed.strategy to fsdp2 or auto, or remove the key",
        ),
    )


@dataclass
class DataloaderConfig:
    """How samples become batches."""

    shuffle: bool = True
    """A new seeded order in each epoch."""
    num_workers: int = setting(0, AT_LEAST_0)
    """Processes per rank that prepare samples ahead."""
    collate_fn: Target | None = field(default=None, metadata={"supplied": ("tokenizer", "processor")})
    """Builder of the function from samples to a batch; null pads to the longest sample."""
    drop_last: bool = False
    """Leave out an epoch's last global batch when it is not full."""
    pad_to_multiple_of: int | None = setting(None, AT_LEAST_1)
    """Round the length of each row up to a multiple of this many tokens, also of rows that samples share."""
    padding_free: bool = True
    """Let samples of a micro-batch share rows where the model keeps them apart; false: pad each one."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("pad_to_multiple_of",),
            ("collate_fn", "padding_free"),
            lambda section: section.collate_fn is None or section.padding_free,
            "collate_fn makes the rows, and with padding_free false they stay as they are",
            "round the lengths in your collate_fn, or remove the key",
        ),
    )


@dataclass
class PackedSequenceConfig:
    """Packs of several samples, which then count as one: batch sizes are in packs. No section: no packing."""

    size: int = setting(2048, AT_LEAST_1)
    """Tokens of a pack; at least the longest sample's."""
    strategy: Literal["best_fit"] = "best_fit"
    """How samples are chosen: best_fit puts each, the longest first, into the fullest pack with room."""


@dataclass
class OptimizerGroup:
    """Parameters that fused AdamW trains with options of their own; an option that is null is the section's."""

    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Which parameters: globs over their names, or hidden_matrices, vision_tower, projector, language_model."""
    lr: float | None = setting(None, FINITE)
    """Peak learning rate."""
    betas: tuple[float, float] | None = setting(None, BETAS)
    """Decay of the two running means."""
    eps: float | None = setting(None, FINITE)
    """Added to the denominator."""
    weight_decay: float | None = setting(None, FINITE)
    """Decoupled weight decay, of all these parameters: no_decay does not apply to them."""


@dataclass
class OptionsGroup:
    """Parameters that an optimizer by ``_target_`` trains with options of their own."""

    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Which parameters: globs over their names, or hidden_matrices, vision_tower, projector, language_model."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The other keys: options of the optimizer."""

    takes_any: ClassVar[bool] = True


@dataclass
class TargetGroup(Target):
    """Parameters that an optimizer of their own trains, such as torch.optim.Muon for matrices."""

    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Which parameters: globs over their names, or hidden_matrices, vision_tower, projector, language_model."""


@dataclass
class OptimizerConfig:
    """Fused AdamW."""

    lr: float = setting(1e-4, FINITE)
    """Peak learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.999), BETAS)
    """Decay of the two running means."""
    eps: float = setting(1e-8, FINITE)
    """Added to the denominator."""
    weight_decay: float = setting(0.01, FINITE)
    """Decoupled weight decay."""
    no_decay: Literal["auto", "none"] | list[str] | None = "auto"
    """Parameters without weight decay: auto (norms and biases), none, or globs over their names."""
    groups: list[OptimizerGroup | TargetGroup] = field(default_factory=list, metadata={"supplied": ("params",)})
    """Parameters with options or an optimizer of their own, the first match first: [{params: ['*.bias'], lr: 1e-5}]."""
    on_resume: Literal["checkpoint", "recipe"] = "checkpoint"
    """Options and peak rates of a resumed run: those of the checkpoint, or those of the recipe."""


@dataclass
class OptimizerTarget(Target):
    """An optimizer by ``_target_``, with the options of every parameter that no group has."""

    no_decay: Literal["auto", "none"] | list[str] | None = "auto"
    """Parameters without weight decay: auto (norms and biases; none if a function makes it), none, or globs."""
    groups: list[OptionsGroup | TargetGroup] = field(default_factory=list, metadata={"supplied": ("params",)})
    """Parameters with options or an optimizer of their own."""
    on_resume: Literal["checkpoint", "recipe"] = "checkpoint"
    """Options and peak rates of a resumed run: those of the checkpoint, or those of the recipe."""


@dataclass
class LRSchedulerConfig:
    """A learning rate schedule of transformers; no section: a constant rate."""

    name: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
    ] = "cosine"  # fmt: skip
    """Name of the schedule."""
    warmup_steps: int | None = setting(None, AT_LEAST_0)
    """Optimizer steps from 0 to the peak rate."""
    warmup_ratio: float | None = setting(None, FRACTION)
    """The same as a part of all steps."""
    decay_steps: int | None = setting(None, AT_LEAST_1)
    """Optimizer steps until the schedule ends; null: all steps of the run."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What the schedule takes besides, such as num_cycles or min_lr."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("warmup_steps", "warmup_ratio"),
            lambda schedule: schedule.warmup_steps is None or schedule.warmup_ratio is None,
            "warmup_steps and warmup_ratio exclude each other",
            "remove one of them",
        ),
    )


@dataclass
class StepSchedulerConfig:
    """How long to train, and when to validate and save."""

    global_batch_size: int = setting(8, AT_LEAST_1)
    """Samples per optimizer step, over all ranks; gradient accumulation follows from it."""
    local_batch_size: int = setting(1, AT_LEAST_1)
    """Samples per rank in one forward pass."""
    num_epochs: int | None = setting(None, AT_LEAST_1)
    """Passes over the data set at most; null: as many as max_steps takes, or 1 if max_steps is null too."""
    max_steps: int | None = setting(None, AT_LEAST_1)
    """Optimizer steps at most."""
    max_time: str | None = setting(None, DURATION)
    """Training time at most, of this start of the run: seconds or HH:MM:SS."""
    ckpt_every_steps: int | Literal["auto"] | None = setting(None, AT_LEAST_1_OR_AUTO)
    """Save each time the step is a multiple of this; auto: as often as pays, by Young and Daly, from measured costs."""
    mtbf_hours: float = setting(24.0, POSITIVE)
    """For ckpt_every_steps auto: the mean time between failures of the whole job."""
    ckpt_every_epochs: int | None = setting(1, AT_LEAST_1)
    """Save each time this many epochs are complete."""
    ckpt_every_minutes: float | None = setting(None, POSITIVE)
    """Save when this many minutes have passed since the last save."""
    ckpt_on_best: bool = False
    """Save when a validation improved checkpoint.best_metric_key."""
    val_every_steps: int | None = setting(None, AT_LEAST_1)
    """Validate each time the step is a multiple of this; checkpoints are validated anyway."""
    stop_signals: list[str] = field(
        default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGHUP"], metadata={"rules": (KNOWN_SIGNALS,)}
    )
    """Save and stop when one of these comes, to any rank or the launcher; Ctrl-C (SIGINT) always does. SIGHUP comes
    when a terminal is closed; under nohup it is ignored."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("global_batch_size", "local_batch_size"),
            lambda steps: steps.global_batch_size % steps.local_batch_size == 0,
            "global_batch_size must be a multiple of local_batch_size",
            "make global_batch_size = local_batch_size x ranks x a whole number of accumulated batches",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("mtbf_hours",),
            ("ckpt_every_steps",),
            lambda steps: steps.ckpt_every_steps == "auto",
            "only ckpt_every_steps auto uses it",
            "set step_scheduler.ckpt_every_steps to auto, or remove the key",
        ),
    )

    @property
    def stop_signal_numbers(self) -> tuple[signal.Signals, ...]:
        """``stop_signals`` and SIGINT."""
        return (*(signal.Signals[name] for name in dict.fromkeys(self.stop_signals)), signal.SIGINT)

    @property
    def effective_num_epochs(self) -> int | None:
        """``num_epochs``, or what null means: no limit with ``max_steps``, else 1."""
        if self.num_epochs is None and self.max_steps is None:
            return 1
        return self.num_epochs

    @property
    def max_time_seconds(self) -> float | None:
        """``max_time`` in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)


@dataclass
class CheckpointConfig:
    """Where and how checkpoints are written and read."""

    enabled: bool = True
    """false: save nothing and resume from nothing."""
    checkpoint_dir: str = setting("checkpoints/", NOT_EMPTY)
    """The run's directory: checkpoints, training.jsonl, validation.jsonl."""
    model_save_format: Literal["safetensors", "torch_save"] = "safetensors"
    """Format of the model's shards; torch_save is PyTorch's DCP."""
    model_layout: Literal["shards", "hf", "adapter"] | None = None
    """shards: files of each rank, to be consolidated; hf, adapter: the final files, filled by all ranks; null: shards,
    with peft adapter."""
    save_consolidated: Literal["final", "every"] | bool | None = None
    """Export Hugging Face files: final, every (or true), false; null: final with safetensors, else false. With
    model_layout adapter any value is accepted: the adapter files in each checkpoint's model/ are the export."""
    is_async: bool = False
    """Write checkpoints in the background: training waits only until its state is copied."""
    export_best: bool = False
    """At the end also export the checkpoint that LOWEST_VAL points to; its adapter files already are the export."""
    restore_from: str | None = None
    """LATEST, LOWEST_VAL, a checkpoint's name or a path; null: the newest usable one."""
    save_optimizer: bool = True
    """false: weights only; such a checkpoint cannot continue exactly."""
    best_metric_key: str = setting("val_loss", NOT_EMPTY)
    """The value that LOWEST_VAL goes by."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest best_metric_key is the best."""
    keep_last: int | None = setting(None, AT_LEAST_1)
    """Remove all but the newest this many; null keeps all. Linked and pinned checkpoints always stay."""
    keep_best: int = setting(0, AT_LEAST_0)
    """Of those that keep_last lets go, keep this many of the best by best_metric_key."""
    keep_every_steps: int | None = setting(None, AT_LEAST_1)
    """Of those that keep_last lets go, keep the multiples of this many steps."""
    keep_steps: list[int] = field(default_factory=list)
    """Of those that keep_last lets go, keep these steps."""
    on_save_failure: Literal["stop", "continue"] = "stop"
    """stop ends the run when a save fails; continue warns and tries again when the next save is due. The exit code is
    then 4, unless a later save succeeds."""
    verify: Literal["none", "size", "digest"] = "digest"
    """What a resume checks of each file before use."""
    allow_missing_state: list[str] = field(default_factory=list)
    """Attributes that may be in the checkpoint or the recipe only."""
    allow_changed_model: bool = False
    """Resume although the model's config changed what its weights compute, such as rope theta or num_heads."""
    on_incompatible: Literal["error", "sibling"] = "error"
    """Where the checkpoints found are of another model: stop, or start anew in a directory beside theirs."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("model_layout", "model_save_format"),
            lambda section: section.model_layout not in ("hf", "adapter") or section.model_save_format == "safetensors",
            "only model_layout shards can have model_save_format torch_save",
            "leave model_save_format out: Hugging Face files are safetensors",
        ),
        Relation(
            ("save_consolidated", "export_best", "model_layout"),
            lambda section: section.model_layout != "hf" or not (section.save_consolidated or section.export_best),
            "with model_layout hf there is nothing to export",
            "leave save_consolidated and export_best out: each checkpoint's model/ holds the Hugging Face files",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("keep_best", "keep_every_steps", "keep_steps"),
            ("keep_last",),
            lambda section: section.keep_last is not None,
            "all checkpoints are kept, because keep_last is not given",
            "set checkpoint.keep_last, or remove the key",
        ),
        Condition(
            ("on_incompatible",),
            ("restore_from",),
            lambda section: section.restore_from is None,
            "restore_from names the checkpoint, so that there is no other directory to start in",
            "remove restore_from or on_incompatible",
        ),
    )


@dataclass
class LoggingConfig:
    """What a run says."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important messages shown."""
    log_every_seconds: float = setting(10.0, FINITE)
    """Pause between progress lines when the output is no terminal."""
    sample_ids: bool = False
    """Add each global batch's sample numbers to training.jsonl."""
    trackers: dict[str, Any] = field(default_factory=dict, metadata={"rules": (KNOWN_TRACKERS, OPTIONS)})
    """Trackers that follow the run, each with its own options: {tensorboard: {}}; also wandb, mlflow, trackio."""


@dataclass
class RecipeConfig:
    """A recipe file."""

    recipe: str = setting("llm_finetune", NOT_EMPTY)
    """The training recipe: a registered name, package.module.Class or path/to/file.py:Class."""
    seed: int = setting(42, SEED)
    """Seeds data order, dropout and fresh weights."""
    model: ModelConfig | Target = field(default_factory=ModelConfig)
    init_from: InitFromConfig | None = None
    tokenizer: TokenizerConfig | Target | None = field(default_factory=TokenizerConfig)
    processor: ProcessorConfig | Target = field(default_factory=ProcessorConfig)
    peft: PeftConfig | None = None
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    dataset: Target = field(default_factory=Target, metadata={"supplied": ("tokenizer", "processor")})
    """The training data: a builder of a map-style or iterable dataset; gets the tokenizer, or the processor."""
    validation_dataset: Target | None = field(default=None, metadata={"supplied": ("tokenizer", "processor")})
    """The validation data, in the same way; null: no validation."""
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    packed_sequence: PackedSequenceConfig | None = None
    optimizer: OptimizerConfig | OptimizerTarget = field(
        default_factory=OptimizerConfig, metadata={"supplied": ("params",)}
    )
    lr_scheduler: LRSchedulerConfig | None = None
    loss_fn: Target | None = field(default=None, metadata={"supplied": ("reduction",)})
    """Builder of the loss; null: cross-entropy over the label tokens of the global batch."""
    clip_grad_norm: float | None = setting(1.0, POSITIVE)
    """Largest norm of all gradients together; null: no clipping."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    deterministic: bool = False
    """Only deterministic kernels, so that CUDA runs are repeatable too."""
    step_scheduler: StepSchedulerConfig = field(default_factory=StepSchedulerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("step_scheduler.ckpt_on_best", "step_scheduler.val_every_steps"),
            lambda recipe: (
                recipe.validation_dataset is not None
                or not (recipe.step_scheduler.ckpt_on_best or recipe.step_scheduler.val_every_steps)
            ),
            "ckpt_on_best and val_every_steps need a validation_dataset",
            "add a validation_dataset section, or remove these keys",
        ),
        Relation(
            ("packed_sequence", "dataloader.collate_fn"),
            lambda recipe: recipe.packed_sequence is None or recipe.dataloader.collate_fn is None,
            "packed_sequence and dataloader.collate_fn exclude each other",
            "remove one of them: only the built-in collator keeps the samples of a pack apart",
        ),
        Relation(
            ("peft", "model.freeze"),
            lambda recipe: recipe.peft is None or not getattr(recipe.model, "freeze", None),
            "peft and model.freeze exclude each other",
            "leave model.freeze out: with peft the whole base is frozen but what peft.modules_to_save and bias name",
        ),
        Relation(
            ("distributed.pp_size", "peft"),
            lambda recipe: recipe.peft is None or recipe.distributed.pp_size == 1,
            "pipeline stages are cut from models without adapters",
            "leave pp_size out: adapters need little memory, and fsdp2 shards their base",
        ),
        Relation(
            ("peft.use_dora", "distributed.tp_size"),
            lambda recipe: recipe.peft is None or not recipe.peft.use_dora or recipe.distributed.tp_size == 1,
            "DoRA needs the norms of whole weights, which tensor parallel ranks do not have",
            "leave peft.use_dora out, or leave tp_size out: fsdp2 shards adapters of any kind",
        ),
        Relation(
            ("peft.quantize_base", "distributed.tp_size"),
            lambda recipe: recipe.peft is None or not recipe.peft.quantize_base or recipe.distributed.tp_size == 1,
            "a quantized base cannot be sharded within its layers",
            "leave peft.quantize_base out, or leave tp_size out",
        ),
        Relation(
            ("peft", "model"),
            lambda recipe: recipe.peft is None or isinstance(recipe.model, ModelConfig),
            "peft cannot be used with a model by _target_: its adapters must name a base that can be found again",
            "name the base in model.from_pretrained, or leave the peft section out",
        ),
        Relation(
            ("checkpoint.model_layout", "peft"),
            lambda recipe: recipe.checkpoint.model_layout != ("hf" if recipe.peft else "adapter"),
            "model_layout adapter is that of a run with peft, and hf that of one without",
            "leave model_layout out, or set it to shards",
        ),
        Relation(
            ("peft.base_dir", "model.from_config"),
            lambda recipe: (
                recipe.peft is None
                or not isinstance(recipe.model, ModelConfig)
                or (recipe.peft.base_dir is None) == (recipe.model.from_config is None)
            ),
            "with peft, model.from_config and peft.base_dir go together: adapters are of use with their base only",
            "name a directory for the fresh base in peft.base_dir, or an existing base in model.from_pretrained",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("checkpoint.keep_best", "checkpoint.export_best", "checkpoint.best_metric_key", "checkpoint.best_mode"),
            ("validation_dataset",),
            lambda recipe: recipe.validation_dataset is not None,
            "without a validation_dataset no checkpoint is the best",
            "add a validation_dataset section, or remove the key",
        ),
        Condition(
            ("dataloader.padding_free",),
            ("packed_sequence",),
            lambda recipe: recipe.packed_sequence is None,
            "the samples of a pack share its row, so that packed_sequence needs a model that keeps them apart",
            "remove padding_free or packed_sequence",
        ),
    )
