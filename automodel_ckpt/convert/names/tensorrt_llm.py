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

from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, TensorMap
from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.dimensions import Dimensions
from automodel_ckpt.convert.names.rules import RowRange, Rule, fuse, join_rows, rename

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


@dataclass(frozen=True)
class RankTensor:
    """What a rank has of a tensor: *part* of the rows *stored*, and then rows of zeros, together of *shape*."""

    name: str
    shape: Shape
    stored: Tensor
    part: Box


def tensors_of_rank(
    tensors: TensorMap, dimensions: Dimensions, rank: int, num_ranks: int
) -> Iterator[RankTensor]:
    """Yield what *rank* has of the complete *tensors*, which have TensorRT-LLM's names.

    Raises ValueError, with a hint, if *num_ranks* ranks cannot divide them.
    """
    for rule, division in _RULES:
        for name, _ in rule.expanded(dimensions):
            tensor = tensors[name]
            rows, columns = [range(tensor.shape[0])], [range(extent) for extent in tensor.shape[1:]]
            zero_rows = 0
            if division == "columns":
                columns = [_share(name, len(columns[0]), rank, num_ranks)]
            elif division == "rows":
                rows = [_share(name, len(rows[0]), rank, num_ranks)]
            elif division == "vocabulary":
                # The last ranks have rows of zeros, if the ranks do not divide the vocabulary.
                size = -(-len(rows[0]) // num_ranks)
                rows = [rows[0][rank * size : (rank + 1) * size]]
                zero_rows = size - len(rows[0])
            elif division == "qkv":
                rows = _heads_of_rank(dimensions, rank, num_ranks)
            stored = join_rows(name, [tensor], [RowRange(0, own.start, len(own)) for own in rows])
            widths = tuple(map(len, columns))
            part = Box((0, *(own.start for own in columns)), (stored.shape[0], *widths))
            yield RankTensor(name, (stored.shape[0] + zero_rows, *widths), stored, part)


def _share(name: str, num_features: int, rank: int, num_ranks: int) -> range:
    size, rest = divmod(num_features, num_ranks)
    if rest:
        raise ValueError(f"use a size that divides {num_features} features of {name}")
    return range(rank * size, (rank + 1) * size)


def _heads_of_rank(dimensions: Dimensions, rank: int, num_ranks: int) -> list[range]:
    """Return the rows of queries, keys and values that a rank has of the fused tensor."""
    num_heads, num_groups = dimensions.num_heads, dimensions.num_query_groups
    if num_heads % num_ranks or (num_groups % num_ranks and num_ranks % num_groups):
        raise ValueError(f"use a size that divides the {num_heads} heads, {num_groups} groups")
    num_queries = num_heads // num_ranks
    num_keys = max(num_groups // num_ranks, 1)
    # With fewer groups than ranks, several ranks have the same keys and values.
    first_key = num_heads + rank // max(num_ranks // num_groups, 1) * num_keys
    heads = [(rank * num_queries, num_queries), (first_key, num_keys)]
    heads.append((first_key + num_groups, num_keys))
    size = dimensions.head_size
    return [range(first * size, (first + count) * size) for first, count in heads]
