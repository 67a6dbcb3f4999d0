"""Llama 3 as torchtitan names it, and its rotary order of rows. Imports no torch.

Source: torchtitan 0.3.0, models/llama3 and the files that it writes. torchtitan rotates neighbors (rows 0 and 1, 2 and
3, ...) of the queries and keys of a head, as Meta's original Llama does; transformers rotates rows that are half a head
apart. The model is the same with the rows in the other order.

The state dict of the model has queries, keys and values apart (``wq``, ``wk``, ``wv``), whether or not the layer fuses
them. The optimizer has the parameter, which is by default the fused ``wqkv``: for each group its queries, key, value.
Versions before 0.3 and Meta's files have other names for the output layer and the projections.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.formats.torch.training_state import (
    OptimizerState,
    ParameterGroup,
    TrainingState,
)
from automodel_ckpt.convert.names.converter import Converter, split_tensor
from automodel_ckpt.convert.names.dimensions import Dimensions, dimensions_of_config
from automodel_ckpt.convert.names.rules import Rule, by_query_group, rename
from automodel_ckpt.convert.names.slicing import RowRange
from automodel_ckpt.errors import CheckpointUnusable

_CONFIG = "config.json"
_TORCHTITAN = "layers.{layer}."
_HUGGING_FACE = "model.layers.{layer}."
_QKV = _TORCHTITAN + "attention.qkv_linear."
# Tensors that every Llama of torchtitan has, on one of its pipeline stages.
_MARKS = ("tok_embeddings.weight", "layers.0.attention_norm.weight")
_CONVERTED = "model.embed_tokens.weight"
# Computed from the config, and saved by some versions.
_COMPUTED = ("freqs_cis", "rope.freqs", "rope.cache")
# Before 0.3, the projections were in the attention itself.
_OLD_PROJECTION = re.compile(r"(layers\.\d+\.attention\.)(w[qkv]\.weight)")
_OLD_OUTPUT = "output.weight"
_OUTPUT = "lm_head.weight"


def by_rotated_pair(dimensions: Dimensions, num_rows: int, num_parts: int) -> list[RowRange]:
    """The rows of each head in pairs: row 0 and the one half a head after it, row 1 and its partner, and so on."""
    size = dimensions.head_size
    if size % 2 or num_rows % size:
        return []  # the converter reports tensors that do not match the config
    ranges: list[RowRange] = []
    for first in range(0, num_rows, size):
        ranges += _rotated(0, first, size)
    return ranges


def by_rotated_query_group(dimensions: Dimensions, num_rows: int, num_parts: int) -> list[RowRange]:
    """For each group its queries, its key and its value. The rows of queries and keys are in pairs."""
    size = dimensions.head_size
    if size % 2:
        return []
    ranges: list[RowRange] = []
    for wanted in by_query_group(dimensions, num_rows, num_parts):
        if wanted.part == 2:
            ranges.append(wanted)
            continue
        for first in range(wanted.first, wanted.first + wanted.num_rows, size):
            ranges += _rotated(wanted.part, first, size)
    return ranges


def _rotated(part: int, first: int, size: int) -> Iterator[RowRange]:
    """Yield the rows of the head that begins at row *first*, in torchtitan's order."""
    half = size // 2
    for row in range(first, first + half):
        yield RowRange(part, row, 1)
        yield RowRange(part, row + half, 1)


def _rotary(torchtitan: str, hugging_face: str) -> Rule:
    return Rule(torchtitan, (hugging_face,), by_rotated_pair, permuted=True)


_QUERY = _HUGGING_FACE + "self_attn.q_proj.weight"
_KEY = _HUGGING_FACE + "self_attn.k_proj.weight"
_VALUE = _HUGGING_FACE + "self_attn.v_proj.weight"

TORCHTITAN_LLAMA = Converter(
    ("llama",),
    (
        rename("tok_embeddings.weight", "model.embed_tokens.weight"),
        rename("norm.weight", "model.norm.weight"),
        # Absent where the output layer shares the weight of the embedding.
        rename(_OUTPUT, "lm_head.weight", optional=True),
        rename(_TORCHTITAN + "attention_norm.weight", _HUGGING_FACE + "input_layernorm.weight"),
        rename(_TORCHTITAN + "ffn_norm.weight", _HUGGING_FACE + "post_attention_layernorm.weight"),
        _rotary(_QKV + "wq.weight", _QUERY),
        _rotary(_QKV + "wk.weight", _KEY),
        rename(_QKV + "wv.weight", _VALUE),
        rename(_TORCHTITAN + "attention.wo.weight", _HUGGING_FACE + "self_attn.o_proj.weight"),
        rename(_TORCHTITAN + "feed_forward.w1.weight", _HUGGING_FACE + "mlp.gate_proj.weight"),
        rename(_TORCHTITAN + "feed_forward.w2.weight", _HUGGING_FACE + "mlp.down_proj.weight"),
        rename(_TORCHTITAN + "feed_forward.w3.weight", _HUGGING_FACE + "mlp.up_proj.weight"),
    ),
)
# Mistral's files (consolidated.safetensors) have the names and the order of rows of Meta's.
_READABLE = (*TORCHTITAN_LLAMA.model_types, "mistral")
_FUSED_SUFFIX = "qkv_linear.wqkv.weight"
_FUSED = Rule(_QKV + "wqkv.weight", (_QUERY, _KEY, _VALUE), by_rotated_query_group, permuted=True)


@dataclass(frozen=True, slots=True)
class TorchtitanConversion:
    """The conversion of torchtitan's names to those of the Hugging Face model whose config *where* is."""

    dimensions: Dimensions
    where: str

    def source(self, source: Source) -> Source:
        """Return *source* with the tensors of the Hugging Face model.

        Raises :class:`CheckpointUnusable` if its tensors are not those of the model.
        """
        directory = str(source.model_directory)
        weights: dict[str, Tensor] = {}
        num_computed = 0
        for name, tensor in source.tensors.items():
            if name in _COMPUTED:
                num_computed += 1
            else:
                weights[_current(name)] = tensor
        converted = TORCHTITAN_LLAMA.to_hugging_face(weights, self.dimensions, directory)
        omitted = source.omitted
        if num_computed:
            omitted = (*omitted, f"{counted(num_computed, 'tensor')} that torchtitan computes")
        return replace(source, tensors=converted, tied={}, omitted=omitted)

    def to_torchtitan(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """Return torchtitan's tensors that consist of the Hugging Face *tensors*, found in *where*.

        A model whose output layer shares the weight of the embedding has it under both names, as torchtitan saves it.
        Raises :class:`CheckpointUnusable` if they are not those of the model.
        """
        found = dict(TORCHTITAN_LLAMA.from_hugging_face(tensors, self.dimensions, where).tensors)
        if _OUTPUT not in found:
            found[_OUTPUT] = found[_MARKS[0]].renamed(_OUTPUT)
        return found

    def training_state(self, state: TrainingState) -> TrainingState:
        """Return *state* with the optimizer's parameters under the names of the Hugging Face model.

        Moments have the same order of rows as their weight. Raises :class:`CheckpointUnusable` if the optimizer does
        not belong to the model.
        """
        if state.optimizer is None:
            return state
        return replace(state, optimizer=self._optimizer(state.optimizer))

    def _optimizer(self, optimizer: OptimizerState) -> OptimizerState:
        rules = self._rules()
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, entries in optimizer.tensors.items():
            rule, targets = self._rule(rules, name)
            for entry, tensor in entries.items():
                for part in split_tensor(rule, tensor, targets, self.dimensions, self.where):
                    moment = part.renamed(f"{part.fqn}.{entry}")
                    tensors.setdefault(part.fqn, {})[entry] = moment
        values: dict[str, Mapping[str, int | float | bool]] = {}
        for name, numbers in optimizer.values.items():
            for target in self._rule(rules, name)[1]:
                values[target] = numbers
        groups: list[ParameterGroup] = []
        for group in optimizer.groups:
            names: list[str] = []
            for name in group.parameters:
                names += self._rule(rules, name)[1]
            groups.append(ParameterGroup(tuple(names), group.options))
        return OptimizerState(optimizer.root, tensors, values, tuple(groups))

    def _rules(self) -> dict[str, tuple[Rule, tuple[str, ...]]]:
        """Return {torchtitan's name of a parameter: its rule, and the names of the Hugging Face parameters in it}."""
        found: dict[str, tuple[Rule, tuple[str, ...]]] = {}
        for rule in (*TORCHTITAN_LLAMA.rules, _FUSED):
            for name, targets in rule.expanded(self.dimensions):
                found[name] = (rule, targets)
        return found

    def _rule(
        self, rules: Mapping[str, tuple[Rule, tuple[str, ...]]], name: str
    ) -> tuple[Rule, tuple[str, ...]]:
        found = rules.get(_current(name))
        if found is None:
            raise CheckpointUnusable(
                "the optimizer has state of a parameter that the model does not have",
                where=self.where,
                value=name[:200],
                hint="use the config.json of the same model",
            )
        return found


def torchtitan_conversion(
    directory: Path, *, model_types: Collection[str] = _READABLE
) -> TorchtitanConversion | None:
    """Return the conversion to the Hugging Face model whose config.json is in *directory*.

    None if there is none, or its model is none of *model_types*. Raises :class:`CheckpointUnusable` if the config is
    damaged.
    """
    config = read_json(directory, _CONFIG)
    if config is None or config.get("model_type") not in model_types:
        return None
    where = str(directory / _CONFIG)
    return TorchtitanConversion(dimensions_of_config(config, where), where)


def required_torchtitan_conversion(
    directory: Path, *, model_types: Collection[str] = _READABLE
) -> TorchtitanConversion:
    """Return the conversion of :func:`torchtitan_conversion`. Raises :class:`CheckpointUnusable` if there is none."""
    found = torchtitan_conversion(directory, model_types=model_types)
    if found is not None:
        return found
    raise CheckpointUnusable(
        "torchtitan's names cannot be converted to those of this model",
        where=str(directory / _CONFIG),
        value=f"its model_type is not {' or '.join(model_types)}, or there is no config.json",
        hint="let torchtitan save in Hugging Face format (last_save_in_hf), or import weights without a config.json",
    )


def has_torchtitan_names(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether *tensors* have the names of a Llama of torchtitan."""
    return all(mark in tensors for mark in _MARKS)


def is_only_in_optimizer(optimizer: OptimizerState, weights: Mapping[str, Tensor]) -> bool:
    """Return whether *optimizer* has torchtitan's names, and *weights* were converted to those of Hugging Face."""
    if _CONVERTED not in weights:
        return False
    for group in optimizer.groups:
        for name in group.parameters:
            if name == _MARKS[0] or name.startswith("layers."):
                return True
    return False


def first_fused(optimizer: OptimizerState) -> str | None:
    """Return a fused parameter of *optimizer*, which the state dict of the model has in parts; None if it has none."""
    for group in optimizer.groups:
        for name in group.parameters:
            if name.endswith(_FUSED_SUFFIX):
                return name
    return None


def with_fused_attention(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return *weights* and, for torchtitan's models, the fused parameters that the optimizer may have instead.

    A fused parameter has the shape of its parts in one, and no slices: only its shape is compared with its moments.
    """
    if not has_torchtitan_names(weights):
        return weights
    found = dict(weights)
    for name, query in weights.items():
        if not name.endswith("qkv_linear.wq.weight"):
            continue
        prefix = name.removesuffix("wq.weight")
        key, value = weights.get(f"{prefix}wk.weight"), weights.get(f"{prefix}wv.weight")
        if key is None or value is None or not query.shape or not key.shape or not value.shape:
            continue
        num_rows = query.shape[0] + key.shape[0] + value.shape[0]
        fused = f"{prefix}wqkv.weight"
        found[fused] = Tensor(fused, query.dtype, (num_rows, *query.shape[1:]), ())
    return found


def _current(name: str) -> str:
    """Return the name that torchtitan 0.3 has for a tensor of any version."""
    if name == _OLD_OUTPUT:
        return _OUTPUT
    old = _OLD_PROJECTION.fullmatch(name)
    if old is not None:
        return f"{old[1]}qkv_linear.{old[2]}"
    return name
