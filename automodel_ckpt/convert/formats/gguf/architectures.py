"""The architectures that are converted between Hugging Face and GGUF, one table entry each.

Sources: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) for keys and tensor names;
the model files of llama.cpp (``src/models/``) for what it computes and has built in; the configuration classes of
transformers 5.23 for defaults. A new architecture is an entry in ``ARCHITECTURES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.type_aliases import Strings, Texts

TOP: Texts = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
"""Hugging Face's names of the tensors outside of layers, to GGUF's."""
_PROJECTIONS = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_TWO_NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
# Gemma also normalizes what attention and the MLP add to the residual stream.
_FOUR_NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_HEAD_NORMS = {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
_BIASES = {
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
}

SHAPES: Mapping[str, Strings] = {
    "token_embd.weight": ("vocabulary", "hidden"),
    "output.weight": ("vocabulary", "hidden"),
    "output_norm.weight": ("hidden",),
    "attn_norm.weight": ("hidden",),
    "post_attention_norm.weight": ("hidden",),
    "ffn_norm.weight": ("hidden",),
    "post_ffw_norm.weight": ("hidden",),
    "attn_q.weight": ("queries", "hidden"),
    "attn_k.weight": ("keys", "hidden"),
    "attn_v.weight": ("keys", "hidden"),
    "attn_output.weight": ("hidden", "queries"),
    "attn_q.bias": ("queries",),
    "attn_k.bias": ("keys",),
    "attn_v.bias": ("keys",),
    "attn_q_norm.weight": ("head",),
    "attn_k_norm.weight": ("head",),
    "ffn_gate.weight": ("inner", "hidden"),
    "ffn_up.weight": ("inner", "hidden"),
    "ffn_down.weight": ("hidden", "inner"),
}
"""The shape of each GGUF tensor, row-major, in words for the sizes of ``GgufModel``."""


@dataclass(frozen=True)
class Setting:
    """A number that config.json and the metadata of GGUF both have.

    *config* is its key in config.json, *gguf* the key in the metadata without the architecture's prefix, and *kind* the
    GGUF type's name as in ``GGUFWriter.add_<kind>``. With *is_optional*, null in config.json means that the metadata
    has no such key.
    """

    config: str
    gguf: str
    kind: str = "uint32"
    is_optional: bool = False


SIZES: tuple[Setting, ...] = (
    Setting("vocab_size", "vocab_size"),
    Setting("max_position_embeddings", "context_length"),
    Setting("hidden_size", "embedding_length"),
    Setting("num_hidden_layers", "block_count"),
    Setting("intermediate_size", "feed_forward_length"),
    Setting("num_attention_heads", "attention.head_count"),
    Setting("num_key_value_heads", "attention.head_count_kv"),
    Setting("head_dim", "attention.key_length"),
    Setting("rms_norm_eps", "attention.layer_norm_rms_epsilon", "float32"),
)
"""The settings that every architecture has."""


@dataclass(frozen=True)
class Architecture:
    """How a class of transformers corresponds to an architecture of llama.cpp.

    *name* is the value of ``general.architecture``. *layer* maps Hugging Face's names of a layer's tensors, after
    ``model.layers.N.``, to GGUF's, after ``blk.N.``. *defaults* are transformers' values of keys that config.json
    lacks. *fixed* are settings that must have this value, because llama.cpp has no other. *positions* are the kinds of
    scaling of positions that it computes (``rope_type`` of transformers).
    """

    name: str
    model_class: str
    model_type: str
    layer: Texts
    defaults: Mapping[str, int | float]
    fixed: Mapping[str, object]
    positions: frozenset[str]
    settings: tuple[Setting, ...] = ()
    is_interleaved: bool = False
    """Whether llama.cpp rotates adjacent elements, and not halves as transformers: query and key rows are permuted."""
    norm_offset: int = 0
    """What llama.cpp's weights of norms are larger by: Gemma multiplies by 1 + weight, llama.cpp by weight."""
    tied_by_default: bool = False
    """Whether the output layer is tied to the embedding where config.json does not state it."""
    must_be_tied: bool = False
    """Whether llama.cpp has no output layer other than the embedding."""
    sliding_by_default: bool = False
    """Whether attention slides where config.json has neither ``layer_types`` nor ``use_sliding_window``."""
    full_attention_period: int = 0
    """Each layer of this number has full attention, the others slide; 0 if llama.cpp has no sliding window here."""
    no_rotation_period: int = 0
    """Each layer of this number has no rotary positions; 0 if all have them."""
    scale_of_hidden_layers: int = 0
    """A model with this number of layers scales attention by hidden_size / heads instead of head_dim."""


_SILU: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_GELU: Mapping[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": None,
}
_SCALED = frozenset({"default", "linear"})

LLAMA = Architecture(
    name="llama",
    model_class="LlamaForCausalLM",
    model_type="llama",
    layer=_TWO_NORMS | _PROJECTIONS,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    fixed=_SILU,
    positions=_SCALED | {"llama3"},
    is_interleaved=True,
)
MISTRAL = Architecture(
    name="llama",
    model_class="MistralForCausalLM",
    model_type="mistral",
    layer=_TWO_NORMS | _PROJECTIONS,
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8},
    fixed=_SILU,
    positions=_SCALED,
    is_interleaved=True,
    sliding_by_default=True,
)
QWEN_2 = Architecture(
    name="qwen2",
    model_class="Qwen2ForCausalLM",
    model_type="qwen2",
    layer=_TWO_NORMS | _PROJECTIONS | _BIASES,
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    fixed={"hidden_act": "silu"},
    positions=_SCALED,
)
QWEN_3 = Architecture(
    name="qwen3",
    model_class="Qwen3ForCausalLM",
    model_type="qwen3",
    layer=_TWO_NORMS | _PROJECTIONS | _HEAD_NORMS,
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "head_dim": 128},
    fixed={"hidden_act": "silu", "attention_bias": False},
    positions=_SCALED,
)
SMOLLM_3 = Architecture(
    name="smollm3",
    model_class="SmolLM3ForCausalLM",
    model_type="smollm3",
    layer=_TWO_NORMS | _PROJECTIONS,
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    fixed=_SILU,
    positions=_SCALED,
    is_interleaved=True,
    tied_by_default=True,
    no_rotation_period=4,
)
GEMMA_2 = Architecture(
    name="gemma2",
    model_class="Gemma2ForCausalLM",
    model_type="gemma2",
    layer=_FOUR_NORMS | _PROJECTIONS,
    defaults={
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed=_GELU,
    positions=frozenset({"default"}),
    settings=(
        Setting("attn_logit_softcapping", "attn_logit_softcapping", "float32"),
        Setting("final_logit_softcapping", "final_logit_softcapping", "float32"),
        Setting("sliding_window", "attention.sliding_window"),
    ),
    norm_offset=1,
    tied_by_default=True,
    must_be_tied=True,
    full_attention_period=2,
    scale_of_hidden_layers=46,
)
GEMMA_3 = Architecture(
    name="gemma3",
    model_class="Gemma3ForCausalLM",
    model_type="gemma3_text",
    layer=_FOUR_NORMS | _PROJECTIONS | _HEAD_NORMS,
    defaults={
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    fixed={**_GELU, "attn_logit_softcapping": None},
    positions=frozenset({"default", "linear"}),
    settings=(
        Setting("final_logit_softcapping", "final_logit_softcapping", "float32", is_optional=True),
        Setting("sliding_window", "attention.sliding_window"),
    ),
    norm_offset=1,
    tied_by_default=True,
    full_attention_period=6,
    scale_of_hidden_layers=62,
)

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA,
    MISTRAL,
    QWEN_2,
    QWEN_3,
    SMOLLM_3,
    GEMMA_2,
    GEMMA_3,
)
"""All architectures. A GGUF file is read as the first one of its name."""
