"""The sections ``model`` and ``compile``: the model to train, and how it is compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_1,
    AT_LEAST_1_OR_AUTO,
    FINITE,
    NOT_EMPTY,
    POSITIVE,
    Condition,
    Relation,
    Rule,
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
    """Settings that replace those of the model's config.json, such as {text_config: {attention_dropout: 0.1}}."""
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
