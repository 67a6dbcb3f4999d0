"""Models of Megatron: grouped queries and RMS norms (Llama, Mistral), with biases (Qwen 2), norms of queries and keys
(Qwen 3), and a router and experts in place of the gated MLP (Qwen 3, Mixtral)."""

from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.rules import Rule, by_query_group, fuse, rename, vocabulary

_MEGATRON = "decoder.layers.{layer}."
_HUGGING_FACE = "model.layers.{layer}."
_EXPERT = "mlp.experts.local_experts.{expert}."


def _in_layer(megatron: str, hugging_face: str) -> Rule:
    return rename(_MEGATRON + megatron, _HUGGING_FACE + hugging_face)


def _queries_keys_values(kind: str) -> Rule:
    names = (f"{_HUGGING_FACE}self_attn.{part}_proj.{kind}" for part in "qkv")
    return fuse(f"{_MEGATRON}self_attention.linear_qkv.{kind}", tuple(names), by_query_group)


def _mlp(megatron: str, hugging_face: str, gate: str, up: str, down: str) -> tuple[Rule, Rule]:
    """Return the rules for a gated MLP: the projections of the gate and up are fused."""
    prefix = _HUGGING_FACE + hugging_face
    return (
        fuse(
            f"{_MEGATRON}{megatron}linear_fc1.weight",
            (f"{prefix}{gate}.weight", f"{prefix}{up}.weight"),
        ),
        rename(f"{_MEGATRON}{megatron}linear_fc2.weight", f"{prefix}{down}.weight"),
    )


QKV = _queries_keys_values("weight")
GATE_AND_UP, DOWN = _mlp("mlp.", "mlp.", "gate_proj", "up_proj", "down_proj")
ATTENTION = (
    vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    # Absent where the output layer shares the weight of the embedding.
    vocabulary("output_layer.weight", "lm_head.weight", optional=True),
    rename("decoder.final_layernorm.weight", "model.norm.weight"),
    _in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    QKV,
    _in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
)
"""The rules that all models of this family have: everything but the MLP."""
MLP = (GATE_AND_UP, DOWN)
_NORMS = (
    _in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
_QWEN_EXPERTS = (
    _in_layer("mlp.router.weight", "mlp.gate.weight"),
    *_mlp(_EXPERT, "mlp.experts.{expert}.", "gate_proj", "up_proj", "down_proj"),
)
_MIXTRAL_EXPERTS = (
    _in_layer("mlp.router.weight", "block_sparse_moe.gate.weight"),
    # w1 is the gate, w3 the projection up, and w2 the one down.
    *_mlp(_EXPERT, "block_sparse_moe.experts.{expert}.", "w1", "w3", "w2"),
)

LLAMA = Converter(("llama", "mistral"), (*ATTENTION, *MLP))
QWEN2 = Converter(("qwen2",), (*ATTENTION, _queries_keys_values("bias"), *MLP))
QWEN3 = Converter(("qwen3",), (*ATTENTION, *_NORMS, *MLP))
QWEN3_MOE = Converter(("qwen3_moe",), (*ATTENTION, *_NORMS, *_QWEN_EXPERTS))
MIXTRAL = Converter(("mixtral",), (*ATTENTION, *_MIXTRAL_EXPERTS))
