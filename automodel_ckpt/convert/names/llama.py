"""Llama 2 and 3, and Mistral: grouped queries, a gated MLP, RMS norms, no biases."""

from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.rules import by_query_group, fuse, rename, vocabulary

_MEGATRON = "decoder.layers.{layer}."
_HUGGING_FACE = "model.layers.{layer}."

EMBEDDING = vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")
# Absent where the output layer shares the weight of the embedding.
OUTPUT = vocabulary("output_layer.weight", "lm_head.weight", optional=True)
FINAL_NORM = rename("decoder.final_layernorm.weight", "model.norm.weight")
ATTENTION_NORM = rename(
    _MEGATRON + "self_attention.linear_qkv.layer_norm_weight",
    _HUGGING_FACE + "input_layernorm.weight",
)
ATTENTION_OUTPUT = rename(
    _MEGATRON + "self_attention.linear_proj.weight", _HUGGING_FACE + "self_attn.o_proj.weight"
)
QKV = fuse(
    _MEGATRON + "self_attention.linear_qkv.weight",
    (
        _HUGGING_FACE + "self_attn.q_proj.weight",
        _HUGGING_FACE + "self_attn.k_proj.weight",
        _HUGGING_FACE + "self_attn.v_proj.weight",
    ),
    by_query_group,
)
MLP_NORM = rename(
    _MEGATRON + "mlp.linear_fc1.layer_norm_weight",
    _HUGGING_FACE + "post_attention_layernorm.weight",
)
GATE_AND_UP = fuse(
    _MEGATRON + "mlp.linear_fc1.weight",
    (_HUGGING_FACE + "mlp.gate_proj.weight", _HUGGING_FACE + "mlp.up_proj.weight"),
)
DOWN = rename(_MEGATRON + "mlp.linear_fc2.weight", _HUGGING_FACE + "mlp.down_proj.weight")

ATTENTION = (EMBEDDING, OUTPUT, FINAL_NORM, ATTENTION_NORM, ATTENTION_OUTPUT, QKV)
"""The rules that the other models of this family have, too."""
MLP = (MLP_NORM, GATE_AND_UP, DOWN)

LLAMA = Converter(("llama", "mistral"), (*ATTENTION, *MLP))
