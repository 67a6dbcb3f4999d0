"""Mixtral: the attention of Llama, and in place of its MLP a router and experts."""

from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.llama import ATTENTION, MLP_NORM
from automodel_ckpt.convert.names.rules import fuse, rename

_MEGATRON = "decoder.layers.{layer}.mlp."
_HUGGING_FACE = "model.layers.{layer}.block_sparse_moe."
_EXPERT = "experts.local_experts.{expert}."

ROUTER = rename(_MEGATRON + "router.weight", _HUGGING_FACE + "gate.weight")
# w1 is the gate, w3 the projection up, and w2 the one down.
GATE_AND_UP = fuse(
    _MEGATRON + _EXPERT + "linear_fc1.weight",
    (
        _HUGGING_FACE + "experts.{expert}.w1.weight",
        _HUGGING_FACE + "experts.{expert}.w3.weight",
    ),
)
DOWN = rename(
    _MEGATRON + _EXPERT + "linear_fc2.weight", _HUGGING_FACE + "experts.{expert}.w2.weight"
)

MIXTRAL = Converter(("mixtral",), (*ATTENTION, MLP_NORM, ROUTER, GATE_AND_UP, DOWN))
