"""Qwen 2 (biases of queries, keys and values) and Qwen 3 (norms of queries and keys; dense, or with experts)."""

from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.llama import ATTENTION, MLP, MLP_NORM
from automodel_ckpt.convert.names.rules import by_query_group, fuse, rename

_MEGATRON = "decoder.layers.{layer}."
_HUGGING_FACE = "model.layers.{layer}."

QKV_BIAS = fuse(
    _MEGATRON + "self_attention.linear_qkv.bias",
    (
        _HUGGING_FACE + "self_attn.q_proj.bias",
        _HUGGING_FACE + "self_attn.k_proj.bias",
        _HUGGING_FACE + "self_attn.v_proj.bias",
    ),
    by_query_group,
)
QUERY_NORM = rename(
    _MEGATRON + "self_attention.q_layernorm.weight", _HUGGING_FACE + "self_attn.q_norm.weight"
)
KEY_NORM = rename(
    _MEGATRON + "self_attention.k_layernorm.weight", _HUGGING_FACE + "self_attn.k_norm.weight"
)
_EXPERT = "mlp.experts.local_experts.{expert}."
EXPERTS = (
    rename(_MEGATRON + "mlp.router.weight", _HUGGING_FACE + "mlp.gate.weight"),
    fuse(
        _MEGATRON + _EXPERT + "linear_fc1.weight",
        (
            _HUGGING_FACE + "mlp.experts.{expert}.gate_proj.weight",
            _HUGGING_FACE + "mlp.experts.{expert}.up_proj.weight",
        ),
    ),
    rename(
        _MEGATRON + _EXPERT + "linear_fc2.weight",
        _HUGGING_FACE + "mlp.experts.{expert}.down_proj.weight",
    ),
)

QWEN2 = Converter(("qwen2",), (*ATTENTION, QKV_BIAS, *MLP))
QWEN3 = Converter(("qwen3",), (*ATTENTION, QUERY_NORM, KEY_NORM, *MLP))
QWEN3_MOE = Converter(("qwen3_moe",), (*ATTENTION, QUERY_NORM, KEY_NORM, MLP_NORM, *EXPERTS))
