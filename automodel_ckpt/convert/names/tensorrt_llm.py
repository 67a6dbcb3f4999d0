"""The tensors of a TensorRT-LLM checkpoint: their names, and how tensor-parallel ranks divide them. Imports no torch.

For Llama and Mistral, whose decoder is called ``llama``. Source: the files and the code of nvidia-modelopt 0.47
(modelopt.torch.export: layer_utils.build_qkv, postprocess, model_config_utils.pad_weights):

* rank r has rows ``[r * n, (r + 1) * n)`` of layers that are divided by their output features, and as many columns of
  those that are divided by their input features;
* queries, keys and values of a rank follow one another in ``attention.qkv``. With fewer key-value heads than ranks,
  several ranks have the same heads;
* the embedding and the output layer have rows of zeros at the end, if the ranks do not divide the vocabulary;
* ``mlp.fc`` is Hugging Face's ``gate_proj``, and ``mlp.gate`` its ``up_proj``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from automodel_ckpt.convert.names.dimensions import Dimensions

Division = Literal["vocabulary", "rows", "columns", "equal", "qkv"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A tensor of TensorRT-LLM, its Hugging Face tensors (three for ``qkv``), and how ranks divide it."""

    name: str
    hugging_face: tuple[str, ...]
    division: Division


_GLOBAL = (
    Rule("transformer.vocab_embedding.weight", ("model.embed_tokens.weight",), "vocabulary"),
    Rule("transformer.ln_f.weight", ("model.norm.weight",), "equal"),
    Rule("lm_head.weight", ("lm_head.weight",), "vocabulary"),
)
_LAYER = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",), "equal"),
    Rule("post_layernorm.weight", ("post_attention_layernorm.weight",), "equal"),
    Rule(
        "attention.qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    Rule("attention.dense.weight", ("self_attn.o_proj.weight",), "columns"),
    Rule("mlp.fc.weight", ("mlp.gate_proj.weight",), "rows"),
    Rule("mlp.gate.weight", ("mlp.up_proj.weight",), "rows"),
    Rule("mlp.proj.weight", ("mlp.down_proj.weight",), "columns"),
)


def rules(num_layers: int) -> Iterator[Rule]:
    """Yield the rules of a model, with full names on both sides."""
    yield from _GLOBAL
    for layer in range(num_layers):
        for rule in _LAYER:
            names = tuple(f"model.layers.{layer}.{name}" for name in rule.hugging_face)
            yield Rule(f"transformer.layers.{layer}.{rule.name}", names, rule.division)


@dataclass(frozen=True, slots=True)
class HeadsOfRank:
    """The heads of one of *num_ranks* tensor-parallel ranks, in rows of the projections.

    A rank has *query_rows* of queries, and *key_rows* of keys and of values.
    """

    query_rows: int
    key_rows: int
    num_sharing: int

    def first_key_row(self, rank: int) -> int:
        """Return the first row of the keys, and of the values, that *rank* has."""
        return rank // self.num_sharing * self.key_rows


def heads_of_rank(dimensions: Dimensions, num_ranks: int) -> HeadsOfRank | None:
    """Return how *num_ranks* ranks divide the heads; None if they cannot."""
    num_groups = dimensions.num_query_groups
    if dimensions.num_heads % num_ranks:
        return None
    if num_groups % num_ranks and num_ranks % num_groups:
        return None
    query_rows = dimensions.num_heads // num_ranks * dimensions.head_size
    key_rows = max(num_groups // num_ranks, 1) * dimensions.head_size
    return HeadsOfRank(query_rows, key_rows, max(num_ranks // num_groups, 1))
