"""The tensors of a TensorRT-LLM checkpoint: their names, and how tensor-parallel ranks divide them. Imports no torch.

For Llama and Mistral. Their decoder is called ``llama``. Source: the files and the code of nvidia-modelopt 0.47
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

from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.dimensions import Dimensions
from automodel_ckpt.convert.names.rules import RowRange, Rule, fuse, rename

Division = Literal["vocabulary", "rows", "columns", "equal", "qkv"]


def _in_layer(name: str, hugging_face: str) -> Rule:
    return rename(
        f"transformer.layers.{{layer}}.{name}.weight",
        f"model.layers.{{layer}}.{hugging_face}.weight",
    )


def by_kind_of_head(dimensions: Dimensions, num_rows: int, num_parts: int) -> list[RowRange]:
    """All queries, then all keys, then all values."""
    num_groups = dimensions.num_query_groups
    heads = (dimensions.num_heads, num_groups, num_groups)
    return [RowRange(part, 0, num * dimensions.head_size) for part, num in enumerate(heads)]


_LAYER = "transformer.layers.{layer}."
_HUGGING_FACE = "model.layers.{layer}."
_RULES: tuple[tuple[Rule, Division], ...] = (
    (rename("transformer.vocab_embedding.weight", "model.embed_tokens.weight"), "vocabulary"),
    (rename("transformer.ln_f.weight", "model.norm.weight"), "equal"),
    # Absent where the output layer shares the weight of the embedding.
    (rename("lm_head.weight", "lm_head.weight", optional=True), "vocabulary"),
    (_in_layer("input_layernorm", "input_layernorm"), "equal"),
    (_in_layer("post_layernorm", "post_attention_layernorm"), "equal"),
    (
        fuse(
            _LAYER + "attention.qkv.weight",
            (
                _HUGGING_FACE + "self_attn.q_proj.weight",
                _HUGGING_FACE + "self_attn.k_proj.weight",
                _HUGGING_FACE + "self_attn.v_proj.weight",
            ),
            by_kind_of_head,
        ),
        "qkv",
    ),
    (_in_layer("attention.dense", "self_attn.o_proj"), "columns"),
    (_in_layer("mlp.fc", "mlp.gate_proj"), "rows"),
    (_in_layer("mlp.gate", "mlp.up_proj"), "rows"),
    (_in_layer("mlp.proj", "mlp.down_proj"), "columns"),
)
TENSORRT_LLAMA = Converter(("llama", "mistral"), tuple(rule for rule, _ in _RULES))
"""The rules for the tensors of one rank."""


@dataclass(frozen=True, slots=True)
class DividedTensor:
    """A tensor of TensorRT-LLM, its Hugging Face tensors (three for ``qkv``), and how ranks divide it."""

    name: str
    hugging_face: tuple[str, ...]
    division: Division


def divided_tensors(dimensions: Dimensions) -> Iterator[DividedTensor]:
    """Yield the tensors of a model."""
    for rule, division in _RULES:
        for name, hugging_face in rule.expanded(dimensions):
            yield DividedTensor(name, hugging_face, division)


def rows_of_rank(dimensions: Dimensions, rank: int, num_ranks: int) -> tuple[range, range] | None:
    """Return the rows of the queries, and of the keys and the values, that *rank* of *num_ranks* has.

    Returns None when the heads cannot be divided among the ranks.
    """
    num_heads, num_groups = dimensions.num_heads, dimensions.num_query_groups
    if num_heads % num_ranks or (num_groups % num_ranks and num_ranks % num_groups):
        return None
    num_queries = num_heads // num_ranks * dimensions.head_size
    num_keys = max(num_groups // num_ranks, 1) * dimensions.head_size
    # With fewer groups than ranks, several ranks have the same keys and values.
    first_key = rank // max(num_ranks // num_groups, 1) * num_keys
    first_query = rank * num_queries
    return range(first_query, first_query + num_queries), range(first_key, first_key + num_keys)
