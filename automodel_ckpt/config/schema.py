"""The keys of a recipe file: one dataclass per section, each field with its type, default, rules and documentation.

The dataclasses are omegaconf structured configs. ``--help`` prints the string below each field. A field's :class:`Rule`
and a section's :class:`Relation` and :class:`Condition` restrict the values of the right type. Neither this module nor
what it imports needs more than the standard library.
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypedDict

from automodel_ckpt.config.evaluation import EvaluationConfig, has_benchmarks
from automodel_ckpt.config.hub import HubConfig
from automodel_ckpt.config.kinds.classification import ClassificationConfig
from automodel_ckpt.config.kinds.distill import DistillConfig
from automodel_ckpt.config.kinds.dpo import DPOConfig
from automodel_ckpt.config.kinds.embedding import EmbeddingConfig
from automodel_ckpt.config.kinds.kto import KTOConfig
from automodel_ckpt.config.kinds.orpo import ORPOConfig
from automodel_ckpt.config.kinds.pretrain import PretrainConfig
from automodel_ckpt.config.kinds.reward_model import RewardModelConfig
from automodel_ckpt.config.registry import is_own
from automodel_ckpt.config.rules import (
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
    WAIT,
    Condition,
    Relation,
    Rule,
    setting,
)
from automodel_ckpt.config.rules import Target as Target
from automodel_ckpt.store_url import is_url

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
KNOWN_TRACKERS = Rule(
    lambda trackers: set(trackers) <= set(TRACKERS), f"a section with {', '.join(TRACKERS)}"
)
OPTIONS = Rule(
    lambda given: all(isinstance(value, dict) for value in given.values()),
    "sections of options, as {}",
)
_IMAGE_SIZES = {
    "size",
    "crop_size",
    "max_image_size",
    "min_pixels",
    "max_pixels",
    "max_soft_tokens",
}
_IMAGE_STEPS = {"resample", "do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_pad"}
_IMAGE_PARTS = {
    "do_convert_rgb",
    "do_image_splitting",
    "crop_to_patches",
    "min_patches",
    "max_patches",
}
_PAN_AND_SCAN = {"do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"}
_IMAGE_TOKENS = {"image_seq_length", "image_seq_len", "padding_side", "use_fast"}
PROCESSOR_SETTINGS = frozenset(
    _IMAGE_SIZES | _IMAGE_STEPS | _IMAGE_PARTS | _PAN_AND_SCAN | _IMAGE_TOKENS
)
"""Settings of processors, for images and padding, that a recipe may override. None of them names code or a file."""
PROCESSOR_OPTIONS = Rule(
    lambda given: set(given) <= PROCESSOR_SETTINGS,
    f"a section of settings out of {', '.join(sorted(PROCESSOR_SETTINGS))}",
)
SET_NAMES = Rule(
    lambda given: all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in given),
    "a section of data sets by name, made of letters, digits, _ and -",
)
POSITIVE_OR_WORD = Rule(lambda size: isinstance(size, str) or size >= 1, "1 or more, or tokenizer")
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Signals that can request a stop. Python, torch or the operating system use the others."""
KNOWN_SIGNALS = Rule(
    lambda names: set(names) <= set(STOP_SIGNALS), f"a list out of {', '.join(STOP_SIGNALS)}"
)
DURATION = Rule(
    lambda text: parse_duration(text) is not None, "a number of seconds above 0, or HH:MM:SS"
)


def parse_duration(text: str) -> float | None:
    """Convert ``90``, ``1.5``, ``MM:SS`` or ``HH:MM:SS`` to seconds; None if the text is not a positive duration."""
    # ASCII: \d and float() accept the digits of every alphabet, other readers do not.
    if not re.fullmatch(r"(\d+:)?\d+:[0-5]\d|\d+(\.\d*)?([eE][+-]?\d+)?", text, re.ASCII):
        return None
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds if 0 < seconds < math.inf else None


def own_keys(section: Any) -> list[str]:
    """Return the fields of a section's dataclass, without ``_target_`` and ``kwargs``."""
    return [each.name for each in fields(section) if each.name not in ("_target_", "kwargs")]


@dataclass
class MtpConfig:
    """Multi-token prediction: train the layers of the model that predict further tokens, and add their loss."""

    loss_scaling_factor: float = setting(0.1, FINITE)
    """Factor of the loss of further tokens, which is the mean over the depths. Both losses are divided by the label
    tokens of the global batch."""
    num_depths: int | None = setting(None, AT_LEAST_1)
    """How many further tokens are predicted; null: as many as the model's config states."""
    repeat_layer: bool = False
    """Use the layer of the first depth for all depths."""
    weights: Literal["base", "new"] = "base"
    """Initial values of the layers: those in the files of from_pretrained (base), or random ones (new). With
    from_config they are always random."""


@dataclass
class ModelConfig:
    """The model to train."""

    from_pretrained: str | None = None
    """Directory or Hub name of the pretrained Hugging Face model."""
    from_config: dict[str, Any] | str | None = None
    """Train from scratch: a transformers config (a mapping with model_type), the path of a config.json or of its
    directory, or a Hub name."""
    revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in from_pretrained or from_config; null: the main branch."""
    trust_remote_code: bool = False
    """Allow the model's repository to supply its code, for types that transformers does not include. Has an effect only
    with --trust trust_remote_code on the command line."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Settings that replace those of the model's config.json, such as {text_config: {attention_dropout: 0.1}}."""
    dtype: Literal["float32", "bfloat16", "float16", "float64", "auto"] | None = None
    """Data type of the parameters; auto: the type in the model's config.json; null: float32, except that a frozen base
    (peft) on a GPU is kept in 16 bits."""
    attn_implementation: str | None = None
    """Attention implementation: eager, sdpa, flash_attention_2, ...; null lets transformers choose."""
    freeze: list[str] = field(default_factory=list)
    """Parameters to freeze: vision_tower, projector, language_model, or glob patterns such as '*.embed_tokens.*'."""
    freeze_if_present: list[str] = field(default_factory=list)
    """Parameters to freeze as with freeze, except that a pattern may match none of the model's parameters."""
    activation_checkpointing: Literal["full", "selective", "offload"] | bool = False
    """Recompute activations in the backward pass, for less memory: full or true recomputes all but the inputs of the
    layers (about a third more time); selective keeps results of attention and of every second matrix product (less
    time, more memory); offload is full with the inputs of the layers in the memory of the host (needs a GPU)."""
    neftune_alpha: float | None = setting(None, POSITIVE)
    """NEFTune: add uniform noise of at most alpha / sqrt(L * d) to the embeddings in training, where L is the length of
    the sample and d the size of an embedding; null: no noise. Usual values are 5 to 15."""
    router_aux_loss: Literal["global_batch", "micro_batch"] | bool = "global_batch"
    """Load-balancing loss of a mixture-of-experts model, computed per global_batch or micro_batch; false: none."""
    mtp: MtpConfig | None = None
    """Multi-token prediction: train the layers that predict further tokens; null: none."""

    vocab_size: Literal["tokenizer"] | int | None = setting(None, POSITIVE_OR_WORD)
    """Resize the vocabulary to this many tokens, or to the tokenizer's size (tokenizer); null: no change."""
    new_tokens: Literal["mean", "init"] = "mean"
    """Initial values of the embeddings that vocab_size adds: mean of the others, or random (init)."""
    allow_missing: list[str] = field(default_factory=list)
    """Glob patterns of weights that may be missing in from_pretrained; they are randomly initialized."""
    allow_unexpected: list[str] = field(default_factory=list)
    """Glob patterns of weights in from_pretrained that the model may lack; they are ignored."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("from_pretrained", "from_config"),
            lambda model: (model.from_pretrained is None) != (model.from_config is None),
            "exactly one of from_pretrained and from_config must be given",
            "set from_pretrained to a directory or Hub name, or from_config to a transformers config",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("new_tokens",),
            ("vocab_size", "from_pretrained"),
            lambda model: model.vocab_size is not None and model.from_pretrained is not None,
            "embeddings are added only with vocab_size and from_pretrained",
            "set model.vocab_size, or remove new_tokens",
        ),
        Condition(
            ("allow_missing", "allow_unexpected"),
            ("from_pretrained",),
            lambda model: model.from_pretrained is not None,
            "no weights are read without from_pretrained",
            "remove the key; for the weights of init_from, set init_from.allow_missing or init_from.allow_unexpected",
        ),
        Condition(
            ("revision", "trust_remote_code"),
            ("from_pretrained", "from_config"),
            lambda model: model.from_pretrained is not None or isinstance(model.from_config, str),
            "the config is given in the recipe, not read from a repository",
            "remove the key, or set from_pretrained or from_config to a Hub name",
        ),
    )


@dataclass
class InitFromConfig:
    """Initial weights of a new run, instead of the pretrained ones. A resumed run ignores this section."""

    path: str = setting(MISSING, NOT_EMPTY)
    """A run directory, a checkpoint, a pointer (checkpoints/LATEST), a Hugging Face directory, a file of torch.save, a
    directory of another program (PyTorch DCP, DeepSpeed), a Hub name, or a URL of an object store with one of these
    (not a single file)."""
    allow_missing: list[str] = field(default_factory=list)
    """Glob patterns of the model's weights that may be missing in path; they keep their initial values."""
    allow_unexpected: list[str] = field(default_factory=list)
    """Glob patterns of weights in path that the model may lack; they are ignored."""


@dataclass
class InitFromSource(InitFromConfig):
    """One of several sources of initial weights. A later source replaces tensors of an earlier one."""

    strip: str = ""
    """Prefix of names in path, such as encoder: it is removed, and other tensors are not used."""
    into: str = ""
    """Module of the model that gets the weights, such as model.audio_tower; empty: the whole model."""


@dataclass
class CompileConfig:
    """torch.compile for each decoder layer. It does not change the names of weights or the checkpoints."""

    enabled: bool = False
    """Compile the layers: the first steps are slower, the others faster."""
    backend: str = setting("inductor", NOT_EMPTY)
    """torch.compile backend. inductor needs a C++ compiler or a GPU; aot_eager needs neither."""
    mode: str | None = None
    """torch.compile mode, such as reduce-overhead or max-autotune; null: the default mode."""
    fullgraph: bool = False
    """Raise an error when a layer has graph breaks, instead of running parts of it uncompiled."""
    dynamic: bool | None = None
    """Dynamic shapes: true from the start, false never (recompile per length), null after the second length."""
    row_widths: Literal["auto"] | int | None = setting("auto", AT_LEAST_1_OR_AUTO)
    """Round the lengths of rows up to at most this many widths, by padding without labels; null: no rounding. auto: 8
    on a GPU and with dynamic: false, else no rounding."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("backend", "mode", "fullgraph", "dynamic", "row_widths"),
            ("enabled",),
            lambda section: section.enabled,
            "nothing is compiled, because compile.enabled is false",
            "set compile.enabled to true, or remove the key",
        ),
    )


@dataclass
class TokenizerConfig:
    """The tokenizer. Set tokenizer: null for data that is already tokenized."""

    from_pretrained: str | None = None
    """Directory or Hub name of a tokenizer; null uses the model's tokenizer."""


@dataclass
class ProcessorConfig:
    """The processor, which prepares text and images for a vision-language model."""

    from_pretrained: str | None = None
    """Directory or Hub name of a processor; null uses the model's processor."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata={"rules": (PROCESSOR_OPTIONS,)})
    """Settings of the processor to override, such as min_pixels, max_pixels, size or padding_side."""


@dataclass
class PeftConfig:
    """LoRA adapters on a frozen base model, with the peft library. Without this section the model itself is trained."""

    method: Literal["lora"] = "lora"
    """Type of adapter."""
    r: int = setting(8, AT_LEAST_1)
    """LoRA rank."""
    alpha: int = setting(16, AT_LEAST_1)
    """LoRA alpha. The adapter's output is scaled by alpha / r, or by alpha / sqrt(r) with use_rslora."""
    dropout: float = setting(0.0, BELOW_1)
    """Dropout probability of the adapter's input during training."""
    target_modules: list[str] | str = "all-linear"
    """Layers to adapt: names (q_proj), glob patterns over full names (*.self_attn.*), or all-linear."""
    target_parameters: list[str] | str = field(default_factory=list)
    """Weights of fused experts to adapt (3 dimensions): names (gate_up_proj), glob patterns over full names
    (*.experts.*), or all-experts: all that the model has, which can be none."""
    exclude_modules: list[str] = field(default_factory=list)
    """Layers to exclude from target_modules: names or glob patterns."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules to train and save in full, such as lm_head: names or glob patterns."""
    use_dora: bool = False
    """Use DoRA (weight-decomposed low-rank adaptation)."""
    use_rslora: bool = False
    """Use rsLoRA (rank-stabilized scaling)."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Initialization of the adapters. With default and gaussian the initial output equals the base's."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the base to train: none, all, or those of adapted layers (lora_only)."""
    ensure_weight_tying: bool = True
    """Keep a tied embedding and output layer tied if one is in modules_to_save; false: allow LoRA on either."""
    dtype: Literal["float32", "base"] = "float32"
    """Data type of the adapters; base: that of the base model."""
    base_dir: str | None = None
    """With model.from_config: the directory where the first start writes the randomly initialized base."""
    quantize_base: Literal["nf4", "fp4", "int8"] | None = None
    """Quantize the frozen base (QLoRA). Requires a CUDA device and bitsandbytes."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("init", "r"),
            lambda peft: peft.init != "orthogonal" or peft.r % 2 == 0,
            "init orthogonal needs an even r",
            "use an even r, or remove init",
        ),
        Relation(
            ("dropout", "use_dora", "init", "target_parameters"),
            lambda peft: (
                not peft.target_parameters
                or (peft.dropout == 0 and not peft.use_dora and peft.init != "orthogonal")
            ),
            "adapters on target_parameters support no dropout, no use_dora, and no init orthogonal",
            "remove that key, or target_parameters",
        ),
    )


@dataclass
class QatConfig:
    """Quantization-aware training: linear layers compute as after a quantized export, and learn to compensate."""

    scheme: Literal["FP8_DYNAMIC", "W8A8", "W8A16", "W4A16", "W4A8"] = "W4A16"
    """Bits of weights (W) and of inputs (A); the schemes of `ckpt export --to compressed-tensors`, and W4A8."""
    group_size: int | None = setting(None, AT_LEAST_1)
    """Columns of a weight that share a scale; null: 128 (W4A16, W8A16, W4A8), else all columns of a row."""
    start_step: int = setting(0, AT_LEAST_0)
    """Number of steps that are trained without rounding first."""


@dataclass
class Fp8Config:
    """Training with matrix products in FP8: linear layers of the decoder compute through torchao (extra `fp8`)."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Scales: tensorwise: one per tensor (fastest); rowwise: one per row (more exact); rowwise_with_gw_hp: rowwise,
    with gradients of weights in the dtype of mixed_precision."""
    exclude: list[str] = field(default_factory=list)
    """Globs of names of layers that do not compute in FP8, such as '*.down_proj'."""
    emulate: bool = False
    """Compute the rounded values in higher precision: slow, for tests on devices without FP8."""


class MeshSizes(TypedDict):
    """The sizes of the device mesh that a recipe gives. A *dp_size* of None takes all remaining ranks."""

    dp_size: int | None
    dp_replicate_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    ep_size: int


@dataclass
class DistributedConfig:
    """Parallelism: how the work is distributed across ranks."""

    strategy: Literal["auto", "fsdp2", "ddp", "single"] = "auto"
    """Data parallelism: fsdp2 shards the model, ddp replicates it; auto: fsdp2 on several ranks (ddp for a quantized
    base); one rank: single, on a GPU with mixed_precision fsdp2."""
    dp_size: int | None = setting(None, AT_LEAST_1)
    """Data-parallel size; null: the number of ranks divided by the other sizes."""
    dp_replicate_size: int = setting(1, AT_LEAST_1)
    """fsdp2: replicas of the model, each sharded across dp_size / dp_replicate_size ranks (HSDP above 1)."""
    tp_size: int = setting(1, AT_LEAST_1)
    """Tensor-parallel size. Layers are sharded according to the model's tensor-parallel plan."""
    # supplied: arguments that the recipe's class adds, so that they are not reported as missing.
    tp_plan: Target | None = field(default=None, metadata={"supplied": ("model",)})
    """Builder of a custom tensor-parallel plan {module name: style}, called with the model; * matches any layer."""
    sequence_parallel: bool = False
    """With tp_size: shard activations between layers along the sequence (Llama and Qwen architectures)."""
    pp_size: int = setting(1, AT_LEAST_1)
    """Pipeline-parallel size: the number of ranks that compute different layers of the model."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved1f1b"] = "1f1b"
    """With pp_size: 1f1b alternates forward and backward passes; gpipe runs all forward passes first; interleaved1f1b
    is 1f1b with several stages on each rank, which wait less for each other."""
    pp_stages_per_rank: int | None = setting(None, AT_LEAST_2)
    """With interleaved1f1b: stages on each rank; null: 2."""
    cp_size: int = setting(1, AT_LEAST_1)
    """Context-parallel size: each row is sharded along the sequence, and attention by heads."""
    ep_size: int = setting(1, AT_LEAST_1)
    """Expert-parallel size: the data-parallel ranks that store different experts and exchange tokens (MoE, fsdp2)."""
    backend: str | None = None
    """torch.distributed backend; null: nccl on GPUs, otherwise gloo."""
    timeout_minutes: float = setting(30.0, WAIT)
    """Timeout of collectives, in minutes (0.1 to 1000000)."""
    reshard_after_forward: bool = True
    """fsdp2: free gathered parameters after the forward pass (less memory, more communication)."""
    cpu_offload: bool = False
    """fsdp2 on GPUs: keep parameters, gradients and optimizer state in CPU memory when not in use."""
    defer_gradient_sync: bool = False
    """fsdp2: reduce gradients over the ranks once per step, after the last micro-batch. Less communication, but each
    rank holds the unsharded gradient, and the gathered parameters, between micro-batches."""
    mixed_precision: Literal["auto", "bfloat16", "float16", "none"] | None = "auto"
    """Data type of forward and backward; weights, gradient reduction and optimizer state keep model.dtype. auto:
    bfloat16 on a GPU; none or null: model.dtype."""

    @property
    def mesh_sizes(self) -> MeshSizes:
        """The sizes of the device mesh, as arguments of functions that compute or build it."""
        return {
            "dp_size": self.dp_size,
            "dp_replicate_size": self.dp_replicate_size,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "cp_size": self.cp_size,
            "ep_size": self.ep_size,
        }

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages on each rank."""
        return (self.pp_stages_per_rank or 2) if self.pp_schedule == "interleaved1f1b" else 1

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            # Without a loss scaler, updates below 6e-8 of a weight would vanish.
            ("mixed_precision",),
            lambda ranks: ranks.mixed_precision != "float16",
            "float16 needs a loss scaler, which is not supported",
            "set it to bfloat16, or remove it",
        ),
        Relation(
            ("sequence_parallel", "tp_plan", "tp_size"),
            lambda ranks: ranks.tp_size > 1 or not (ranks.sequence_parallel or ranks.tp_plan),
            "sequence_parallel and tp_plan require tensor parallelism, but tp_size is 1",
            "set tp_size above 1, or remove them",
        ),
        Relation(
            ("pp_size", "sequence_parallel"),
            lambda ranks: ranks.pp_size == 1 or not ranks.sequence_parallel,
            "pp_size and sequence_parallel cannot be combined",
            "remove sequence_parallel; tp_size works with pipeline stages without it",
        ),
        Relation(
            ("pp_stages_per_rank", "pp_schedule"),
            lambda ranks: (
                ranks.pp_stages_per_rank is None or ranks.pp_schedule == "interleaved1f1b"
            ),
            "only the schedule interleaved1f1b has several stages on each rank",
            "set pp_schedule to interleaved1f1b, or remove pp_stages_per_rank",
        ),
        Relation(
            ("pp_schedule", "pp_size"),
            lambda ranks: ranks.pp_size > 1 or ranks.pp_schedule == "1f1b",
            "pp_schedule requires pipeline parallelism, but pp_size is 1",
            "set pp_size above 1, or remove pp_schedule",
        ),
        Relation(
            # The gradient norm is then summed in CPU memory, which nccl cannot reduce.
            ("cpu_offload", "backend"),
            lambda ranks: (
                not ranks.cpu_offload or ranks.backend in (None, "gloo") or "cpu:" in ranks.backend
            ),
            "cpu_offload needs a backend that also reduces CPU tensors",
            "remove backend, or set it to cpu:gloo,cuda:nccl",
        ),
        Relation(
            ("ep_size", "tp_size"),
            lambda ranks: ranks.ep_size == 1 or ranks.tp_size == 1,
            "ep_size and tp_size cannot be combined",
            "remove one of them",
        ),
        Relation(
            ("ep_size", "strategy"),
            lambda ranks: ranks.ep_size == 1 or ranks.strategy in ("auto", "fsdp2"),
            "expert parallelism shards the model, which only fsdp2 does",
            "set distributed.strategy to fsdp2 or auto, or remove ep_size",
        ),
        Relation(
            ("cp_size", "sequence_parallel"),
            lambda ranks: ranks.cp_size == 1 or not ranks.sequence_parallel,
            "cp_size and sequence_parallel cannot be combined: both shard the sequence",
            "remove sequence_parallel",
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
        Condition(
            ("defer_gradient_sync",),
            ("strategy",),
            lambda ranks: ranks.strategy in ("auto", "fsdp2"),
            "only fsdp2 can reduce gradients after each micro-batch; ddp reduces them once per step",
            "set distributed.strategy to fsdp2 or auto, or remove the key",
        ),
    )


@dataclass
class DataloaderConfig:
    """How samples are batched."""

    shuffle: bool = True
    """Shuffle the samples in each epoch, with a seeded permutation."""
    num_workers: int = setting(0, AT_LEAST_0)
    """Worker processes per rank."""
    collate_fn: Target | None = field(
        default=None, metadata={"supplied": ("tokenizer", "processor")}
    )
    """Builder of the function that collates samples into a batch; null: pad to the longest sample."""
    drop_last: bool = False
    """Drop the last incomplete global batch of each epoch."""
    pad_to_multiple_of: int | None = setting(None, AT_LEAST_1)
    """Pad each row to a multiple of this many tokens, including rows with several samples."""
    padding_free: bool = True
    """Concatenate the samples of a micro-batch without padding if the model supports it; false: pad each one."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("pad_to_multiple_of",),
            ("collate_fn", "padding_free"),
            lambda section: section.collate_fn is None or section.padding_free,
            "rows made by collate_fn are not padded when padding_free is false",
            "pad to a multiple in your collate_fn, or remove the key",
        ),
    )


@dataclass
class PackedSequenceConfig:
    """Sequence packing. A pack counts as one sample in batch sizes. Without this section, samples are not packed."""

    size: int = setting(2048, AT_LEAST_1)
    """Maximum tokens per pack; at least the length of the longest sample."""
    strategy: Literal["best_fit"] = "best_fit"
    """Packing strategy: best_fit places samples, longest first, into the fullest pack that fits them."""


@dataclass
class OptimizerGroup:
    """Parameters with their own options for fused AdamW; a null option uses the value of the optimizer section."""

    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Parameters of the group: glob patterns, or hidden_matrices, vision_tower, projector, language_model."""
    lr: float | None = setting(None, FINITE)
    """Peak learning rate."""
    betas: tuple[float, float] | None = setting(None, BETAS)
    """Decay rates of the running averages of the gradient and its square."""
    eps: float | None = setting(None, FINITE)
    """Term added to the denominator for numerical stability."""
    weight_decay: float | None = setting(None, FINITE)
    """Decoupled weight decay of all parameters of the group; no_decay does not apply to them."""


@dataclass
class OptionsGroup:
    """Parameters with their own options for an optimizer given by ``_target_``."""

    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Parameters of the group: glob patterns, or hidden_matrices, vision_tower, projector, language_model."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The other keys: options of the optimizer."""

    takes_any: ClassVar[bool] = True


@dataclass
class TargetGroup(Target):
    """Parameters with their own optimizer, such as torch.optim.Muon for matrices."""

    # kw_only, because a required field cannot follow the defaults of Target otherwise.
    params: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Parameters of the group: glob patterns, or hidden_matrices, vision_tower, projector, language_model."""


@dataclass
class OptimizerConfig:
    """Fused AdamW."""

    lr: float = setting(1e-4, FINITE)
    """Peak learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.999), BETAS)
    """Decay rates of the running averages of the gradient and its square."""
    eps: float = setting(1e-8, FINITE)
    """Term added to the denominator for numerical stability."""
    weight_decay: float = setting(0.01, FINITE)
    """Decoupled weight decay."""
    no_decay: Literal["auto", "none"] | list[str] | None = "auto"
    """Parameters without weight decay: auto (norms and biases), none, or a list of glob patterns."""
    groups: list[OptimizerGroup | TargetGroup] = field(
        default_factory=list, metadata={"supplied": ("params",)}
    )
    """Parameter groups with their own options or optimizer; the first match wins: [{params: ['*.bias'], lr: 1e-5}]."""
    on_resume: Literal["checkpoint", "recipe"] = "checkpoint"
    """Where a resumed run takes its optimizer options and peak learning rates from."""


@dataclass
class OptimizerTarget(Target):
    """An optimizer given by ``_target_``, with the options of all parameters outside of groups."""

    no_decay: Literal["auto", "none"] | list[str] | None = "auto"
    """Parameters without weight decay: auto (norms and biases; none if _target_ is a function), none, or globs."""
    groups: list[OptionsGroup | TargetGroup] = field(
        default_factory=list, metadata={"supplied": ("params",)}
    )
    """Parameter groups with their own options or optimizer."""
    on_resume: Literal["checkpoint", "recipe"] = "checkpoint"
    """Where a resumed run takes its optimizer options and peak learning rates from."""


@dataclass
class LRSchedulerConfig:
    """Learning rate schedule from transformers. Without this section the learning rate is constant."""

    name: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = "cosine"
    """Name of the schedule."""
    warmup_steps: int | None = setting(None, AT_LEAST_0)
    """Warmup, in optimizer steps."""
    warmup_ratio: float | None = setting(None, FRACTION)
    """Warmup, as a fraction of all optimizer steps."""
    decay_steps: int | None = setting(None, AT_LEAST_1)
    """Length of the schedule in optimizer steps; null: all steps of the run."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the schedule, such as num_cycles or min_lr."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("warmup_steps", "warmup_ratio"),
            lambda schedule: schedule.warmup_steps is None or schedule.warmup_ratio is None,
            "warmup_steps and warmup_ratio cannot be combined",
            "remove one of them",
        ),
    )


@dataclass
class EarlyStoppingConfig:
    """End the run when a metric of the validations does not improve anymore."""

    metric: str | None = setting(None, NOT_EMPTY)
    """Metric of validations, such as val_loss or val_accuracy_NAME; null: checkpoint.best_metric_key."""
    patience: int = setting(3, AT_LEAST_1)
    """Consecutive validations without an improvement after which the run ends."""
    min_delta: float = setting(0.0, FINITE)
    """A value has to be better than the best one by more than this to be an improvement."""


@dataclass
class OnSpikeConfig:
    """What follows a step whose loss or gradient norm is far above those before, or not finite: the run goes back to a
    checkpoint and leaves out the batches that led to it."""

    rollback: int = setting(1, AT_LEAST_1)
    """Go back to the state of N steps before the spike: load the newest checkpoint before, and repeat the steps up to
    there."""
    skip: int | None = setting(None, AT_LEAST_1)
    """Batches that are then left out; null: as many as rollback, so that the last one is that of the spike."""
    loss_factor: float | None = setting(2.0, POSITIVE)
    """A loss above this times the median of the window is a spike; null: no limit."""
    grad_norm_factor: float | None = setting(10.0, POSITIVE)
    """A gradient norm above this times the median of the window is a spike; null: no limit."""
    window: int = setting(50, AT_LEAST_2)
    """Number of steps before, of which the median is taken. There is no limit until the first window is full."""
    max_rollbacks: int = setting(10, AT_LEAST_1)
    """End the run with an error at the next spike after so many."""


@dataclass
class StepSchedulerConfig:
    """Batch sizes, training length, and when to validate and save."""

    global_batch_size: int = setting(8, AT_LEAST_1)
    """Samples per optimizer step, across all ranks. It determines the gradient accumulation steps."""
    local_batch_size: int = setting(1, AT_LEAST_1)
    """Samples per rank and forward pass (micro-batch)."""
    num_epochs: int | None = setting(None, AT_LEAST_1)
    """Maximum number of epochs; null: as many as max_steps needs, or 1 if max_steps is null too."""
    max_steps: int | None = setting(None, AT_LEAST_1)
    """Maximum number of optimizer steps."""
    max_time: str | None = setting(None, DURATION)
    """Maximum training time since this start, in seconds or HH:MM:SS."""
    ckpt_every_steps: int | Literal["auto"] | None = setting(None, AT_LEAST_1_OR_AUTO)
    """Save every N steps; auto: the Young/Daly interval, computed from measured save costs."""
    mtbf_hours: float = setting(24.0, POSITIVE)
    """For ckpt_every_steps auto: mean time between failures of the whole job, in hours."""
    ckpt_every_epochs: int | None = setting(1, AT_LEAST_1)
    """Save every N epochs."""
    ckpt_every_minutes: float | None = setting(None, POSITIVE)
    """Save when N minutes have passed since the last save."""
    ckpt_on_best: bool = False
    """Save when a validation improves checkpoint.best_metric_key."""
    val_every_steps: int | None = setting(None, AT_LEAST_1)
    """Validate every N steps, in addition to the validation at each checkpoint."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when a metric of the validations does not improve anymore."""
    stop_after_nonfinite_steps: int | None = setting(None, AT_LEAST_1)
    """Stop with an error after N consecutive steps with a loss or gradient norm that is not finite; null: never. The
    updates of such steps are always left out."""
    on_spike: OnSpikeConfig | None = None
    """Go back and leave out batches when the loss or the gradient norm spikes; null: continue."""
    stop_signals: list[str] = field(
        default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGHUP"],
        metadata={"rules": (KNOWN_SIGNALS,)},
    )
    """Save and stop when any rank or the launcher receives one of these signals. SIGINT (Ctrl-C) is always handled.
    SIGHUP is sent when a terminal closes; nohup ignores it."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("global_batch_size", "local_batch_size"),
            lambda steps: steps.global_batch_size % steps.local_batch_size == 0,
            "global_batch_size must be a multiple of local_batch_size",
            "set global_batch_size = local_batch_size x data-parallel ranks x gradient accumulation steps",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("mtbf_hours",),
            ("ckpt_every_steps",),
            lambda steps: steps.ckpt_every_steps == "auto",
            "it is only used with ckpt_every_steps auto",
            "set step_scheduler.ckpt_every_steps to auto, or remove the key",
        ),
    )

    @property
    def stop_signal_numbers(self) -> tuple[signal.Signals, ...]:
        """``stop_signals`` and SIGINT."""
        return (*(signal.Signals[name] for name in dict.fromkeys(self.stop_signals)), signal.SIGINT)

    @property
    def effective_num_epochs(self) -> int | None:
        """``num_epochs``; if that is null, 1, or None (no limit) if ``max_steps`` is set."""
        # max_time does not count: it limits one start, so a requeued run would never end.
        if self.num_epochs is None and self.max_steps is None:
            return 1
        return self.num_epochs

    @property
    def max_time_seconds(self) -> float | None:
        """``max_time`` in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)


@dataclass
class EmaConfig:
    """An exponential moving average of the trained weights, saved and exported beside the model."""

    decay: float = setting(0.999, BELOW_1)
    """Share of the old average that an update keeps; the present weights have the rest."""
    start_step: int = setting(1, AT_LEAST_0)
    """Until this step, the average equals the weights; 0: it begins with the initial weights."""
    update_every_steps: int = setting(1, AT_LEAST_1)
    """Update the average after each step that is a multiple of N."""
    validate: bool = False
    """Validate with the average instead of the trained weights. The metrics keep their names."""


@dataclass
class GenerationConfig:
    """Completions of a few prompts at each validation, written to the log, training.jsonl, plots and trackers."""

    prompts: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Prompts. With a chat template, each is a message of the user."""
    system: str | None = None
    """The system message before each prompt."""
    raw: bool = False
    """Continue the prompts as text, without the chat template."""
    max_new_tokens: int = setting(64, AT_LEAST_1)
    """Maximum tokens of a completion."""
    temperature: float = setting(0.0, FINITE)
    """0: always the most probable token; above 0: sample, with the same random numbers at each validation of a step."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("system",),
            ("raw",),
            lambda section: not section.raw,
            "raw prompts are not messages",
            "remove generation.system or generation.raw",
        ),
    )


@dataclass
class RemoteConfig:
    """Copies of the checkpoints in an object store. Published checkpoints are uploaded in the background. A start
    loads the newest one, unless the local disk has it. Credentials come from the environment."""

    url: str = ""
    """URL of the run's directory in the store: s3://BUCKET/PATH, gs://, az://, hf://, or file:// of a mounted disk.
    Without it, checkpoint_dir must be such a URL."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the store, such as endpoint_url and region_name; no secrets."""
    required: bool = False
    """Wait at the end of the run until the last checkpoint is in the store; false: only while uploads make progress."""
    keep_last: int | None = setting(None, AT_LEAST_1)
    """Keep the newest N checkpoints in the store and remove others; null: keep all."""
    keep_best: int = setting(0, AT_LEAST_0)
    """In addition to keep_last, keep the N best checkpoints in the store."""
    keep_every_steps: int | None = setting(None, AT_LEAST_1)
    """In addition to keep_last, keep checkpoints in the store whose step is a multiple of N."""
    keep_steps: list[int] = field(default_factory=list)
    """In addition to keep_last, keep the checkpoints of these steps in the store."""
    max_mb_per_second: float | None = setting(None, POSITIVE)
    """Maximum rate of uploads, in 10^6 bytes per second; null: no limit."""
    num_threads: int = setting(8, AT_LEAST_1)
    """Files, and parts of large files, that are transferred at the same time."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("keep_best", "keep_every_steps", "keep_steps"),
            ("keep_last",),
            lambda section: section.keep_last is not None,
            "the store keeps all checkpoints, because keep_last is not set",
            "set checkpoint.remote.keep_last, or remove the key",
        ),
    )


@dataclass
class MemoryConfig:
    """Checkpoints in memory between those on disk. After a failure, a restart continues from the newest one."""

    every_steps: int | Literal["auto"] = setting(1, AT_LEAST_1_OR_AUTO)
    """Copy the state to memory every N steps, which a failure loses at most. auto: as often as training waits for
    copies for about 1% of its time, and never for a copy that is still being written."""
    directory: str = setting("/dev/shm", NOT_EMPTY)  # noqa: S108 - the directory made in it is private
    """Directory on a tmpfs (a file system in memory), with space for two copies of the state of all ranks of a node."""


@dataclass
class CheckpointConfig:
    """How checkpoints are saved and loaded."""

    enabled: bool = True
    """Save checkpoints and resume from them."""
    checkpoint_dir: str = setting("checkpoints/", NOT_EMPTY)
    """Run directory, for checkpoints, training.jsonl and validation.jsonl; or a URL, as remote.url."""
    scratch_dir: str | None = setting(None, NOT_EMPTY)
    """If checkpoint_dir is a URL: the local directory in which this run gets its own directory, where checkpoints are
    written and wait for their upload; null: runs/ in $AUTOMODEL_CKPT_CACHE or ~/.cache/automodel_ckpt. On several nodes
    it must be on storage that they share."""
    model_save_format: Literal["safetensors", "torch_save"] = "safetensors"
    """Format of the model's shards; torch_save is the format of torch.distributed.checkpoint (DCP)."""
    model_layout: Literal["shards", "hf", "adapter"] | None = None
    """shards: each rank writes its own files; hf, adapter: all ranks write the final Hugging Face or peft files
    together; null: shards, or adapter with peft."""
    save_consolidated: Literal["final", "every"] | bool | None = None
    """Export Hugging Face files from the final or every (or true) checkpoint, or never (false); null: final with
    safetensors, otherwise false. With model_layout adapter, model/ is the export: any value is accepted."""
    is_async: bool = False
    """Save asynchronously: training continues as soon as the state is copied to CPU memory."""
    incremental: Literal["auto"] | bool = "auto"
    """Share the files of tensors that do not train with an earlier checkpoint by hard links. auto: if they take 16 MiB
    or more, and never with the checkpoint just before, so that two checkpoints stay independent; true: always."""
    export_best: bool = False
    """At the end, also export the checkpoint that LOWEST_VAL points to. Not needed with adapters."""
    export_ema: bool = False
    """At the end, also export the average of the weights (section ema) of the last checkpoint. Not needed with adapters
    or model_layout hf."""
    average_last: int | None = setting(None, AT_LEAST_2)
    """At the end, average the weights of the newest N checkpoints. The result is a checkpoint of Hugging Face files in
    averaged/ in the run directory; a resume does not use it."""
    restore_from: str | None = None
    """Checkpoint to resume from: LATEST, LOWEST_VAL, a name, a path or a URL; null: the newest usable one."""
    save_optimizer: bool = True
    """Save the optimizer state; false: only weights, so that a resume is not exact."""
    best_metric_key: str = setting("val_loss", NOT_EMPTY)
    """Metric that selects the best checkpoint (LOWEST_VAL)."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a lower (min) or a higher (max) best_metric_key is better."""
    keep_last: int | None = setting(None, AT_LEAST_1)
    """Keep the newest N checkpoints and remove others; null: keep all. Linked and pinned ones are never removed."""
    keep_best: int = setting(0, AT_LEAST_0)
    """In addition to keep_last, keep the N best checkpoints by best_metric_key."""
    keep_every_steps: int | None = setting(None, AT_LEAST_1)
    """In addition to keep_last, keep checkpoints whose step is a multiple of N."""
    keep_steps: list[int] = field(default_factory=list)
    """In addition to keep_last, keep the checkpoints of these steps."""
    on_save_failure: Literal["stop", "continue"] = "stop"
    """When a save fails: stop the run, or continue with a warning until the next save is due. The exit code is then 4
    unless a later save succeeds."""
    verify: Literal["none", "size", "digest"] = "digest"
    """What to verify of each file before resuming."""
    allow_missing_state: list[str] = field(default_factory=list)
    """Attributes that may be missing in the checkpoint or in the recipe."""
    allow_changed_model: bool = False
    """Resume even if the model's config changed in a way that affects its outputs, such as rope_theta."""
    on_incompatible: Literal["error", "sibling"] = "error"
    """If existing checkpoints are of another model: raise an error, or start a new run in a sibling directory."""
    remote: RemoteConfig | None = None
    """Copies of the checkpoints in an object store; null: none."""
    memory: MemoryConfig | None = None
    """Checkpoints in memory between those on disk; null: none."""
    verify_replicas: bool = False
    """Before each save, compare the replicas of the model (DDP, HSDP) bit by bit. If they differ, the run
    names the ranks and ends, or restarts."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("model_layout", "model_save_format"),
            lambda section: (
                section.model_layout not in ("hf", "adapter")
                or section.model_save_format == "safetensors"
            ),
            "model_save_format torch_save requires model_layout shards",
            "remove model_save_format: Hugging Face files are safetensors",
        ),
        Relation(
            ("save_consolidated", "export_best", "model_layout"),
            lambda section: (
                section.model_layout != "hf"
                or not (section.save_consolidated or section.export_best)
            ),
            "save_consolidated and export_best have no effect with model_layout hf",
            "remove them: model/ in each checkpoint already contains the Hugging Face files",
        ),
        Relation(
            ("average_last", "keep_last"),
            lambda section: (
                section.average_last is None
                or section.keep_last is None
                or section.keep_last >= section.average_last
            ),
            "average_last needs more checkpoints than keep_last keeps",
            "set keep_last to at least average_last",
        ),
        Relation(
            ("memory", "on_incompatible"),
            lambda section: section.memory is None or section.on_incompatible != "sibling",
            "checkpoints in memory belong to one run directory, and on_incompatible: sibling may choose another",
            "remove memory, or set on_incompatible to error",
        ),
        Relation(
            ("remote.url", "checkpoint_dir"),
            lambda section: (
                section.remote is None or bool(section.remote.url) != is_url(section.checkpoint_dir)
            ),
            "exactly one of remote.url and checkpoint_dir must be the URL of the store",
            "set remote.url to a URL and checkpoint_dir to a local directory, or only checkpoint_dir to a URL",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("keep_best", "keep_every_steps", "keep_steps"),
            ("keep_last",),
            lambda section: section.keep_last is not None,
            "all checkpoints are kept, because keep_last is not set",
            "set checkpoint.keep_last, or remove the key",
        ),
        Condition(
            ("on_incompatible",),
            ("restore_from",),
            lambda section: section.restore_from is None,
            "restore_from selects the checkpoint",
            "remove restore_from or on_incompatible",
        ),
        Condition(
            ("scratch_dir",),
            ("checkpoint_dir",),
            lambda section: is_url(section.checkpoint_dir),
            "checkpoint_dir is a local directory",
            "remove it, or set checkpoint_dir to a URL",
        ),
    )


@dataclass
class LoggingConfig:
    """Console output, log files and trackers."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of the messages shown."""
    log_every_seconds: float = setting(10.0, FINITE)
    """Seconds between progress lines when the output is not a terminal."""
    log_every_steps: int | None = setting(None, AT_LEAST_1)
    """Print a progress line after every so many steps instead, and send only these steps to the trackers;
    training.jsonl has all steps. null: by time, and trackers get all steps."""
    peak_tflops: float | None = setting(None, POSITIVE)
    """Rate of one device in TFLOP/s that the logged MFU is relative to; null: measured at the start on a GPU, and no
    MFU on a CPU."""
    sample_ids: bool = False
    """Log the sample indices of each global batch to training.jsonl."""
    trackers: dict[str, Any] = field(
        default_factory=dict, metadata={"rules": (KNOWN_TRACKERS, OPTIONS)}
    )
    """Experiment trackers and their options, such as {tensorboard: {}}; also wandb, mlflow, trackio."""


@dataclass
class HangsConfig:
    """Steps that do not end, and ranks that are slower than others. When a step hangs, the stacks of all ranks are
    written to hangs/ in the run directory, and the rank that the others wait for is reported. Saves, validations and
    the first steps do not count."""

    min_seconds: float = setting(300.0, POSITIVE)
    """A step hangs if it takes at least so many seconds, and factor times the median of the steps before."""
    factor: float = setting(10.0, POSITIVE)
    """A step hangs if it takes so many times the median of the steps before, and at least min_seconds."""
    restart: bool = True
    """Restart the ranks after a hang, if --max-restarts allows it; false: report it, and wait."""
    straggler_share: float = setting(0.1, POSITIVE)
    """Report a rank that the median of the ranks waits for, in each step for more than this share of it."""


RANK_NUMBERS = Rule(
    lambda ranks: bool(ranks) and all(rank >= 0 for rank in ranks), "a list of ranks from 0"
)


@dataclass
class ProfileConfig:
    """A trace of a few steps with torch's profiler. Without this section, nothing is traced."""

    start_step: int = setting(10, AT_LEAST_2)
    """First traced step, counted from the start of this process: the first steps of every start are slower."""
    num_steps: int = setting(3, AT_LEAST_1)
    """Number of traced steps."""
    warmup_steps: int = setting(1, AT_LEAST_1)
    """Steps before start_step that run with the profiler, whose measurements are dropped."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata={"rules": (RANK_NUMBERS,)})
    """Ranks that write a trace each."""
    record_shapes: bool = False
    """Record the shapes of the inputs of operations."""
    with_stack: bool = False
    """Record the lines of source code that call operations; the traced steps are slower."""
    memory: bool = False
    """Record how operations allocate memory."""
    directory: str | None = None
    """Directory of the traces; null: profile/ in the run directory, or in the current one without checkpoints."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("start_step", "warmup_steps"),
            lambda section: section.warmup_steps < section.start_step,
            "warmup_steps must be less than start_step: these steps come before it",
            "increase profile.start_step, or decrease profile.warmup_steps",
        ),
    )


def has_validation(recipe: Any) -> bool:
    """Whether a recipe, or a namespace with its fields, has validation data."""
    return recipe.validation_dataset is not None or bool(recipe.validation_datasets)


def has_metrics(recipe: Any) -> bool:
    """Whether a recipe measures something beside the training loss."""
    return has_validation(recipe) or has_benchmarks(recipe)


def predicts_further(recipe: Any) -> bool:
    """Whether a recipe has a section model.mtp."""
    return getattr(recipe.model, "mtp", None) is not None


KIND_SECTIONS: dict[str, tuple[str, ...]] = {
    "classification": ("sequence_classification",),
    "kto": ("kto",),
    "reward_model": ("reward_model",),
    "distill": ("distill",),
    "pretrain": ("pretrain",),
    "dpo": ("dpo",),
    "orpo": ("orpo",),
    "embedding": ("embedding",),
}
"""Section -> the recipes of this package that read it. A recipe of a user may read any section."""


def _kind_relations() -> tuple[Relation, ...]:
    """Restrict each section of :data:`KIND_SECTIONS` to its recipes."""
    relations = []
    for section, recipes in KIND_SECTIONS.items():
        names = " or ".join(recipes)

        def is_read(recipe: Any, section: str = section, names: tuple[str, ...] = recipes) -> bool:
            is_given = getattr(recipe, section) is not None
            return not is_given or recipe.recipe in names or not is_own(recipe.recipe)

        problem = f"only the recipe {names} reads the section {section}"
        hint = f"set recipe: {recipes[0]}, or remove the section"
        relations.append(Relation((section,), is_read, problem, hint))
    return tuple(relations)


@dataclass
class RecipeConfig:
    """A recipe file."""

    recipe: str = setting("llm_finetune", NOT_EMPTY)
    """Training recipe: a registered name, package.module.Class, or path/to/file.py:Class."""
    seed: int = setting(42, SEED)
    """Random seed for data order, dropout and weight initialization."""
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
    """Builders of further validation data by name. The loss of NAME is val_loss_NAME; val_loss is that of
    validation_dataset, or without it of the first set here."""
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    kto: KTOConfig | None = None
    reward_model: RewardModelConfig | None = None
    dpo: DPOConfig | None = None
    orpo: ORPOConfig | None = None
    packed_sequence: PackedSequenceConfig | None = None
    pretrain: PretrainConfig | None = None
    embedding: EmbeddingConfig | None = None
    optimizer: OptimizerConfig | OptimizerTarget = field(
        default_factory=OptimizerConfig, metadata={"supplied": ("params",)}
    )
    lr_scheduler: LRSchedulerConfig | None = None
    loss_fn: Target | None = field(default=None, metadata={"supplied": ("reduction",)})
    """Builder of the loss; null: cross-entropy, averaged over the label tokens of the global batch."""
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

    relations: ClassVar[tuple[Relation, ...]] = (
        *_kind_relations(),
        Relation(
            ("step_scheduler.ckpt_on_best", "step_scheduler.val_every_steps"),
            lambda recipe: (
                has_validation(recipe)
                or not (
                    recipe.step_scheduler.val_every_steps
                    or (recipe.step_scheduler.ckpt_on_best and not has_benchmarks(recipe))
                )
            ),
            "ckpt_on_best and val_every_steps need a validation_dataset",
            "add a validation_dataset (or validation_datasets) section, or remove these keys",
        ),
        Relation(
            ("hub", "checkpoint.enabled"),
            lambda recipe: recipe.hub is None or recipe.checkpoint.enabled,
            "checkpoints are uploaded, and checkpoint.enabled is false",
            "enable checkpoints, or remove the section hub",
        ),
        Relation(
            ("hub.push", "validation_dataset"),
            lambda recipe: (
                recipe.hub is None
                or recipe.hub.push != "best"
                or has_validation(recipe)
                or has_benchmarks(recipe)
            ),
            "without validation, no checkpoint is the best",
            "add a validation_dataset section, or set hub.push to final or every",
        ),
        Relation(
            ("generation", "validation_dataset"),
            lambda recipe: recipe.generation is None or has_validation(recipe),
            "completions are generated at validations, and there is no validation data",
            "add a validation_dataset section, or remove generation",
        ),
        Relation(
            ("generation", "distributed.pp_size", "distributed.cp_size"),
            lambda recipe: (
                recipe.generation is None
                or (recipe.distributed.pp_size == 1 and recipe.distributed.cp_size == 1)
            ),
            "completions cannot be generated with pipeline stages or context parallelism",
            "remove generation; ckpt generate completes prompts with a checkpoint",
        ),
        Relation(
            (
                "evaluation.harness",
                "distributed.pp_size",
                "distributed.cp_size",
                "distributed.sequence_parallel",
            ),
            lambda recipe: (
                not has_benchmarks(recipe)
                or (
                    recipe.distributed.pp_size == 1
                    and recipe.distributed.cp_size == 1
                    and not recipe.distributed.sequence_parallel
                )
            ),
            "tasks cannot run with pipeline stages, context parallelism or sequence parallelism",
            "remove evaluation.harness; ckpt eval runs tasks on a checkpoint",
        ),
        Relation(
            ("packed_sequence", "dataloader.collate_fn"),
            lambda recipe: recipe.packed_sequence is None or recipe.dataloader.collate_fn is None,
            "packed_sequence and dataloader.collate_fn cannot be combined",
            "remove one of them: packing requires the built-in collator",
        ),
        Relation(
            ("pretrain.z_loss", "model.mtp"),
            lambda recipe: (
                recipe.pretrain is None
                or not recipe.pretrain.z_loss
                or not predicts_further(recipe)
            ),
            "pretrain.z_loss and model.mtp cannot be combined",
            "remove one of them",
        ),
        Relation(
            ("pretrain.base_width", "model", "peft"),
            lambda recipe: (
                recipe.pretrain is None
                or not recipe.pretrain.base_width
                or (getattr(recipe.model, "from_config", None) is not None and not recipe.peft)
            ),
            "pretrain.base_width scales initial values: it needs model.from_config, and no peft",
            "remove base_width, or train a model from its config",
        ),
        Relation(
            ("pretrain.split_documents", "packed_sequence"),
            lambda recipe: (
                recipe.pretrain is None
                or not recipe.pretrain.split_documents
                or recipe.packed_sequence is None
                or recipe.packed_sequence.size >= 2
            ),
            "rows that divide documents need at least two tokens",
            "increase packed_sequence.size",
        ),
        Relation(
            ("peft", "model.freeze"),
            lambda recipe: recipe.peft is None or not getattr(recipe.model, "freeze", None),
            "peft and model.freeze cannot be combined",
            "remove model.freeze: peft freezes the base except for peft.modules_to_save and peft.bias",
        ),
        Relation(
            ("peft", "model.freeze_if_present"),
            lambda recipe: (
                recipe.peft is None or not getattr(recipe.model, "freeze_if_present", None)
            ),
            "peft and model.freeze_if_present cannot be combined",
            "remove it: peft freezes the base except for peft.modules_to_save and peft.bias",
        ),
        Relation(
            ("qat", "peft"),
            lambda recipe: recipe.qat is None or recipe.peft is None,
            "qat and peft cannot be combined: an adapter is merged before the weights are rounded",
            "remove one of the sections",
        ),
        Relation(
            ("fp8", "qat"),
            lambda recipe: recipe.fp8 is None or recipe.qat is None,
            "fp8 and qat cannot be combined: both replace the products of linear layers",
            "remove one of the sections",
        ),
        Relation(
            ("fp8", "distributed.tp_size"),
            lambda recipe: recipe.fp8 is None or recipe.distributed.tp_size == 1,
            "fp8 and tp_size cannot be combined",
            "remove one of them, or shard the model with distributed.strategy fsdp2 alone",
        ),
        Relation(
            ("fp8", "model"),
            lambda recipe: recipe.fp8 is None or isinstance(recipe.model, ModelConfig),
            "fp8 cannot be used with model._target_: only models of transformers are converted",
            "set model.from_pretrained or model.from_config, or remove the section fp8",
        ),
        Relation(
            ("qat", "distributed.tp_size"),
            lambda recipe: recipe.qat is None or recipe.distributed.tp_size == 1,
            "qat and tp_size cannot be combined: scales need complete rows of the weights",
            "remove tp_size, and use fsdp2",
        ),
        Relation(
            ("qat", "model"),
            lambda recipe: recipe.qat is None or isinstance(recipe.model, ModelConfig),
            "qat cannot be used with model._target_: only models of transformers are quantized",
            "set model.from_pretrained or model.from_config, or remove the section qat",
        ),
        Relation(
            ("peft.target_parameters", "distributed.ep_size"),
            lambda recipe: (
                recipe.peft is None
                or not recipe.peft.target_parameters
                or recipe.distributed.ep_size == 1
            ),
            "peft.target_parameters and ep_size cannot be combined",
            "remove ep_size: fsdp2 shards experts with adapters",
        ),
        Relation(
            ("model.mtp", "distributed.pp_size"),
            lambda recipe: not predicts_further(recipe) or recipe.distributed.pp_size == 1,
            "model.mtp and pp_size cannot be combined: no stage has both the embeddings and the last hidden states",
            "remove pp_size (fsdp2 shards the model), or model.mtp",
        ),
        Relation(
            ("model.mtp", "distributed.tp_size"),
            lambda recipe: not predicts_further(recipe) or recipe.distributed.tp_size == 1,
            "model.mtp and tp_size cannot be combined: there is no plan for the layers of further tokens",
            "remove tp_size (fsdp2 shards the model), or model.mtp",
        ),
        Relation(
            ("model.mtp.weights", "peft"),
            lambda recipe: (
                not predicts_further(recipe)
                or recipe.peft is None
                or (recipe.model.mtp.weights == "base" and recipe.model.from_config is None)
            ),
            "with peft, the layers of model.mtp are frozen, and random ones would never be trained",
            "train adapters on a base that has these layers, or remove model.mtp",
        ),
        Relation(
            ("peft.use_dora", "distributed.tp_size"),
            lambda recipe: (
                recipe.peft is None or not recipe.peft.use_dora or recipe.distributed.tp_size == 1
            ),
            "peft.use_dora and tp_size cannot be combined: DoRA needs the norms of unsharded weights",
            "remove peft.use_dora, or remove tp_size and use fsdp2",
        ),
        Relation(
            ("peft.quantize_base", "distributed.tp_size"),
            lambda recipe: (
                recipe.peft is None
                or not recipe.peft.quantize_base
                or recipe.distributed.tp_size == 1
            ),
            "peft.quantize_base and tp_size cannot be combined",
            "remove peft.quantize_base, or remove tp_size",
        ),
        Relation(
            ("peft", "model"),
            lambda recipe: recipe.peft is None or isinstance(recipe.model, ModelConfig),
            "peft cannot be used with model._target_: adapters must reference a base model by name",
            "set model.from_pretrained, or remove the peft section",
        ),
        Relation(
            ("checkpoint.model_layout", "peft"),
            lambda recipe: recipe.checkpoint.model_layout != ("hf" if recipe.peft else "adapter"),
            "model_layout adapter requires peft, and model_layout hf requires a run without peft",
            "remove model_layout, or set it to shards",
        ),
        Relation(
            ("peft.base_dir", "model.from_config"),
            lambda recipe: (
                recipe.peft is None
                or not isinstance(recipe.model, ModelConfig)
                or (recipe.peft.base_dir is None) == (recipe.model.from_config is None)
            ),
            "with peft, model.from_config and peft.base_dir must be set together",
            "set peft.base_dir to a directory for the new base, or use an existing base in model.from_pretrained",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            (
                "checkpoint.keep_best",
                "checkpoint.export_best",
                "checkpoint.best_metric_key",
                "checkpoint.best_mode",
            ),
            ("validation_dataset", "validation_datasets", "evaluation.harness"),
            has_metrics,
            "the best checkpoint is undefined without a validation_dataset",
            "add a validation_dataset section, or remove the key",
        ),
        Condition(
            ("ema.validate",),
            ("validation_dataset", "validation_datasets"),
            has_validation,
            "nothing is measured without validation data",
            "add a validation_dataset section, or remove the key",
        ),
        Condition(
            ("checkpoint.export_ema",),
            ("ema",),
            lambda recipe: recipe.ema is not None,
            "there is no average of the weights without the section ema",
            "add the section (ema: {decay: 0.999}), or remove the key",
        ),
        Condition(
            ("step_scheduler.on_spike",),
            ("checkpoint.enabled",),
            lambda recipe: recipe.checkpoint.enabled,
            "without checkpoints, a run cannot go back",
            "set checkpoint.enabled true, or remove on_spike",
        ),
        Condition(
            ("step_scheduler.early_stopping",),
            ("validation_dataset", "validation_datasets", "evaluation.harness"),
            has_metrics,
            "nothing is measured without validation data",
            "add a validation_dataset section, or remove the key",
        ),
        Condition(
            ("pretrain.split_documents", "pretrain.attend_across_documents"),
            ("packed_sequence",),
            lambda recipe: recipe.packed_sequence is not None,
            "without packed_sequence, no row has two documents",
            "add a packed_sequence section with the size of a row, or remove the key",
        ),
        Condition(
            ("dataloader.padding_free",),
            ("packed_sequence",),
            lambda recipe: recipe.packed_sequence is None,
            "packed_sequence always concatenates samples",
            "remove padding_free or packed_sequence",
        ),
    )
