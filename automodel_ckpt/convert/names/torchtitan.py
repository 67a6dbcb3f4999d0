"""Llama 3 as torchtitan names it, and its rotary order of rows. Imports no torch.

Source: torchtitan 0.3.0, models/llama3 and the files that it writes. torchtitan rotates neighbors (rows 0 and 1, 2 and
3, ...) of the queries and keys of a head, as Meta's original Llama does; transformers rotates rows that are half a head
apart. The model is the same with the rows in the other order.

The state dict of the model has queries, keys and values apart (``wq``, ``wk``, ``wv``), whether or not the layer fuses
them. The optimizer has the fused parameter: its state is not read.
Versions before 0.3 and Meta's files have other names for the output layer and the projections.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from automodel_ckpt.checkpoint.parts.slices import TensorDict, TensorMap
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.names.conversion import Conversion
from automodel_ckpt.convert.names.converter import Converter
from automodel_ckpt.convert.names.dimensions import Dimensions, dimensions_of_config
from automodel_ckpt.convert.names.rules import RowRange, fuse, rename

_CONFIG = "config.json"
_TORCHTITAN = "layers.{layer}."
_HUGGING_FACE = "model.layers.{layer}."
_QKV = _TORCHTITAN + "attention.qkv_linear."
# Tensors that every Llama of torchtitan has, on one of its pipeline stages.
_MARKS = ("tok_embeddings.weight", "layers.0.attention_norm.weight")
# Before 0.3, the projections were in the attention itself.
_OLD_PROJECTION = re.compile(r"(layers\.\d+\.attention\.)(w[qkv]\.weight)")
_OLD_OUTPUT = "output.weight"
_OUTPUT = "lm_head.weight"


def by_rotated_pair(dimensions: Dimensions, num_rows: int, num_parts: int) -> list[RowRange]:
    """The rows of each head in pairs: row 0 and the one half a head after it, row 1 and its partner, and so on."""
    size = dimensions.head_size
    if size % 2 or num_rows % size:
        return []  # the converter reports tensors that do not match the config
    half = size // 2
    return [
        RowRange(0, row, 1)
        for head in range(0, num_rows, size)
        for first in range(head, head + half)
        for row in (first, first + half)
    ]


TORCHTITAN_LLAMA = Converter(
    # Mistral's files (consolidated.safetensors) have the names and the order of rows of Meta's.
    ("llama", "mistral"),
    (
        rename("tok_embeddings.weight", "model.embed_tokens.weight"),
        rename("norm.weight", "model.norm.weight"),
        # Absent where the output layer shares the weight of the embedding.
        rename(_OUTPUT, "lm_head.weight", optional=True),
        rename(_TORCHTITAN + "attention_norm.weight", _HUGGING_FACE + "input_layernorm.weight"),
        rename(_TORCHTITAN + "ffn_norm.weight", _HUGGING_FACE + "post_attention_layernorm.weight"),
        fuse(_QKV + "wq.weight", (_HUGGING_FACE + "self_attn.q_proj.weight",), by_rotated_pair),
        fuse(_QKV + "wk.weight", (_HUGGING_FACE + "self_attn.k_proj.weight",), by_rotated_pair),
        rename(_QKV + "wv.weight", _HUGGING_FACE + "self_attn.v_proj.weight"),
        rename(_TORCHTITAN + "attention.wo.weight", _HUGGING_FACE + "self_attn.o_proj.weight"),
        rename(_TORCHTITAN + "feed_forward.w1.weight", _HUGGING_FACE + "mlp.gate_proj.weight"),
        rename(_TORCHTITAN + "feed_forward.w2.weight", _HUGGING_FACE + "mlp.down_proj.weight"),
        rename(_TORCHTITAN + "feed_forward.w3.weight", _HUGGING_FACE + "mlp.up_proj.weight"),
    ),
)


def to_torchtitan(conversion: Conversion, tensors: TensorMap, where: str) -> TensorDict:
    """Return torchtitan's tensors that consist of the Hugging Face *tensors*, found in *where*.

    If the output layer shares the weight of the embedding, the weight is returned under both names, as torchtitan saves
    it. Raises :class:`CheckpointUnusable` if the tensors do not match the model.
    """
    found = dict(TORCHTITAN_LLAMA.from_hugging_face(tensors, conversion.dimensions, where).tensors)
    if _OUTPUT not in found:
        found[_OUTPUT] = found[_MARKS[0]].renamed(_OUTPUT)
    return found


def _current_names(tensors: TensorMap, where: str) -> TensorDict:
    return {_current(name): tensor for name, tensor in tensors.items()}


def torchtitan_conversion(directory: Path) -> Conversion | None:
    """Return the conversion to the Hugging Face model with its config.json in *directory*, or None for another model.

    Raises :class:`CheckpointUnusable` if the config is damaged.
    """
    config = read_json(directory, _CONFIG)
    if config is None or config.get("model_type") not in TORCHTITAN_LLAMA.model_types:
        return None
    where = str(directory / _CONFIG)
    return Conversion(TORCHTITAN_LLAMA, dimensions_of_config(config, where), where, _current_names)


def has_torchtitan_names(tensors: Collection[str]) -> bool:
    """Return whether *tensors* have the names of a Llama of torchtitan."""
    return all(mark in tensors for mark in _MARKS)


def _current(name: str) -> str:
    """Return the name that torchtitan 0.3 has for a tensor of any version."""
    if name == _OLD_OUTPUT:
        return _OUTPUT
    old = _OLD_PROJECTION.fullmatch(name)
    if old is not None:
        return f"{old[1]}qkv_linear.{old[2]}"
    return name
