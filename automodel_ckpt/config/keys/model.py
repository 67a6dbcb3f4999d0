"""The sections ``model``, ``compile``, ``init_from``, ``peft``, ``qat`` and ``fp8``: what is trained, and from what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_1_OR_AUTO,
    BELOW_1,
    FINITE,
    MISSING,
    NOT_EMPTY,
    POSITIVE,
    Condition,
    Relation,
    Rule,
    needs,
    setting,
)

POSITIVE_OR_WORD = Rule(lambda size: isinstance(size, str) or size >= 1, "1 or more, or tokenizer")


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

    from_pretrained: str | None = setting(None, NOT_EMPTY)
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
    """Settings that replace settings of the model's config.json, such as {text_config: {attention_dropout: 0.1}}."""
    dtype: Literal["float32", "bfloat16", "float16", "float64", "auto"] | None = None
    """Data type of the parameters; auto: the type in the model's config.json; null: float32, except that a frozen base
    (peft) on a GPU is kept in 16 bits."""
    attn_implementation: str | None = None
    """Attention implementation: eager, sdpa, flash_attention_2, ...; null lets transformers choose."""
    fused_layers: Literal["auto"] | bool = "auto"
    """Compute RMS normalizations, gated layers and rotary embeddings in one kernel each, and add LoRA adapters within
    matrix products; auto: on a GPU. With compile, torch makes the kernels of the former."""
    freeze: list[str] = field(default_factory=list)
    """Parameters to freeze: vision_tower, audio_tower, projector, language_model, or globs as '*.embed_tokens.*'."""
    freeze_if_present: list[str] = field(default_factory=list)
    """Parameters to freeze as with freeze, except that a pattern may match none of the model's parameters."""
    activation_checkpointing: Literal["full", "selective"] | bool = False
    """Recompute activations in the backward pass, for less memory: full or true recomputes all but the inputs of the
    layers (about a third more time); selective keeps results of attention and of every second matrix product (less
    time, more memory)."""
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
        needs(
            "allow_missing allow_unexpected",
            "from_pretrained",
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
        needs(
            "backend mode fullgraph dynamic row_widths",
            "enabled",
            "nothing is compiled, because compile.enabled is false",
            "set compile.enabled to true, or remove the key",
        ),
    )


@dataclass
class InitFromConfig:
    """Initial weights of a new run, instead of the pretrained ones. A resumed run ignores this section."""

    path: str = setting(MISSING, NOT_EMPTY)
    """A run directory, a checkpoint, a pointer (checkpoints/LATEST), a Hugging Face directory, a file of torch.save, a
    directory of another program (PyTorch DCP, DeepSpeed), or a Hub name."""
    revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in path; null: the main branch."""
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


_NUMBERS_BY_NAME = Rule(
    lambda numbers: all(type(number) is int and number >= 1 for number in numbers.values()),
    "a mapping from names of layers to whole numbers of 1 or more",
)


@dataclass
class PeftConfig:
    """LoRA adapters on a frozen base model, with the peft library. Without this section the model itself is trained."""

    method: Literal["lora"] = "lora"
    """Type of adapter."""
    r: int = setting(8, AT_LEAST_1)
    """LoRA rank."""
    alpha: int = setting(16, AT_LEAST_1)
    """LoRA alpha. The adapter's output is scaled by alpha / r, or by alpha / sqrt(r) with use_rslora."""
    rank_pattern: dict[str, Any] = field(
        default_factory=dict, metadata={"rules": (_NUMBERS_BY_NAME,)}
    )
    """Ranks of some layers of target_modules, by name or glob pattern; the first that matches a layer is used."""
    alpha_pattern: dict[str, Any] = field(
        default_factory=dict, metadata={"rules": (_NUMBERS_BY_NAME,)}
    )
    """Alphas of some layers of target_modules, by name or glob pattern; the first that matches a layer is used."""
    dropout: float = setting(0.0, BELOW_1)
    """Dropout probability of the adapter's input during training."""
    target_modules: list[str] | str = "all-linear"
    """Layers to adapt: names (q_proj), glob patterns over full names (*.self_attn.*), or all-linear."""
    target_parameters: list[str] | str = field(default_factory=list)
    """Weights of fused experts to adapt (3 dimensions): names (gate_up_proj), glob patterns over full names
    (*.experts.*), or all-experts: all that the model has, which can be none."""
    exclude_modules: list[str] = field(default_factory=list)
    """Layers to exclude from target_modules: names or glob patterns."""
    exclude_if_present: list[str] = field(default_factory=list)
    """Layers to exclude as with exclude_modules, except that a pattern may match none of the model's layers."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules to train and save in full, such as lm_head: names or glob patterns."""
    use_dora: bool = False
    """Use DoRA (weight-decomposed low-rank adaptation)."""
    use_rslora: bool = False
    """Use rsLoRA (rank-stabilized scaling)."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Initialization of the adapters. With default and gaussian the initial output equals the base's."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the base to train: none, all, or the adapted layers' (lora_only)."""
    ensure_weight_tying: bool = True
    """Keep a tied embedding and output layer tied if one is in modules_to_save; false: allow LoRA on either."""
    dtype: Literal["float32", "base"] = "float32"
    """Data type of the adapters; base: the base model's."""
    base_dir: str | None = None
    """With model.from_config: the directory where the first start writes the randomly initialized base."""
    quantize_base: Literal["nf4", "fp4", "int8"] | None = None
    """Quantize the frozen base (QLoRA). A GPU needs bitsandbytes. int8 needs a GPU, and is not sharded (ddp)."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("quantize_base", "use_dora", "init"),
            lambda peft: (
                peft.quantize_base not in ("nf4", "fp4")
                or (not peft.use_dora and peft.init != "orthogonal")
            ),
            "adapters on a base in 4 bits support no use_dora and no init orthogonal",
            "remove that key, or quantize_base",
        ),
        Relation(
            ("init", "r", "rank_pattern"),
            lambda peft: (
                peft.init != "orthogonal"
                or all(rank % 2 == 0 for rank in (peft.r, *peft.rank_pattern.values()))
            ),
            "init orthogonal needs even ranks (r and rank_pattern)",
            "use even ranks, or remove init",
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
