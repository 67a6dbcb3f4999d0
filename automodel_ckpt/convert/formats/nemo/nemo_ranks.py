"""Merge the weights that NeMo and Megatron saved for each rank of tensor and pipeline parallelism. Imports no torch.

With tensor parallelism, a linear layer is divided by its output features (column parallel) or by its input features
(row parallel); norms and some biases are equal on all ranks. Which one a tensor is follows from its name (source:
megatron.core.tensor_parallel.layers, and the layers that use it, 0.16). A name without a known rule is an error: a
wrong merge would look like a model.

With pipeline parallelism, each stage numbers its own layers from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.source import unusable
from automodel_ckpt.convert.formats.torch.torch_files import TorchModel
from automodel_ckpt.errors import CheckpointUnusable

# Source: nemo.utils.model_utils.inject_model_parallel_rank, NeMo 3.0.
_TENSOR_DIRECTORY = re.compile(r"mp_rank_([0-9]{2,4})", re.ASCII)
_PIPELINE_DIRECTORY = re.compile(r"tp_rank_([0-9]{2,4})_pp_rank_([0-9]{3,4})", re.ASCII)
_LAYER = re.compile(r"(.*?\blayers\.)([0-9]{1,6})(\..*)", re.ASCII)
_COLUMN = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "query_key_value.weight",
    "query_key_value.bias",
    "dense_h_to_4h_2.weight",
    "dense_h_to_4h_2.bias",
)
# The first layer of an MLP: column parallel, and with a gated activation two matrices in one.
_MLP_IN = (
    "linear_fc1.weight",
    "linear_fc1.bias",
    "dense_h_to_4h.weight",
    "dense_h_to_4h.bias",
)
_ROW = (
    "linear_proj.weight",
    "linear_fc2.weight",
    "attention.dense.weight",
    "dense_4h_to_h.weight",
)
_EQUAL = (
    "linear_proj.bias",
    "linear_fc2.bias",
    "attention.dense.bias",
    "dense_4h_to_h.bias",
    "position_embeddings.weight",
    "rotary_pos_emb.inv_freq",
    "router.weight",
)
_NORM = re.compile(r"(.*[._])?(layernorm|layer_norm|norm)(_weight|_bias|\.weight|\.bias)", re.ASCII)
_GATED = re.compile(r"(fast-)?(geglu|reglu|swiglu|squared-reglu)", re.ASCII)
_HINT = (
    "save the model with NeMo as one file (tensor and pipeline parallel size 1), and use that; the rules for its "
    "layers are not known here"
)


@dataclass(frozen=True, slots=True)
class RankedFile:
    """The weights of one rank: *model* is stored in *file*, a path below the root of the source."""

    tensor_rank: int
    pipeline_rank: int
    model: TorchModel
    file: str


Rule = Literal["column", "gated column", "row", "equal"]


def rank_of_directory(name: str) -> tuple[int, int] | None:
    """Return (tensor-parallel rank, pipeline-parallel rank) of a directory by its name; None for another name."""
    if match := _TENSOR_DIRECTORY.fullmatch(name):
        return int(match[1]), 0
    if match := _PIPELINE_DIRECTORY.fullmatch(name):
        return int(match[1]), int(match[2])
    return None


def merged_ranks(
    files: Sequence[RankedFile], config: Mapping[str, Any], where: Path
) -> dict[str, Tensor]:
    """Return the tensors of the whole model as slices of the ranks' *files*.

    *config* is NeMo's, with each scalar as text: it states whether the MLPs are gated. Raises
    :class:`CheckpointUnusable` if a rank is missing, or a tensor has no known rule or a wrong shape.
    """
    stages = _stages(files, where)
    tensors: dict[str, Tensor] = {}
    first_layer = 0
    for stage in stages:
        merged = _merged_stage(stage, config, where)
        num_layers = 0
        for name, tensor in merged.items():
            match = _LAYER.fullmatch(name)
            if match is not None and len(stages) > 1:
                num_layers = max(num_layers, int(match[2]) + 1)
                name = f"{match[1]}{first_layer + int(match[2])}{match[3]}"
            if name in tensors:
                # The last stage has a copy of tied embeddings, as its output layer.
                if name.endswith("word_embeddings.weight"):
                    continue
                raise unusable("two pipeline stages have the same tensor", where, name)
            tensors[name] = _renamed(tensor, name)
        first_layer += num_layers
    if not tensors:
        raise unusable("there are no weights in this checkpoint of NeMo", where, "no tensors")
    return tensors


def _stages(files: Sequence[RankedFile], where: Path) -> list[list[RankedFile]]:
    """Return the files by pipeline rank, then by tensor rank. Raises :class:`CheckpointUnusable` if one is missing."""
    if not files:
        value = "no model_weights.ckpt, model_weights/ or mp_rank_00/"
        raise unusable("there are no weights in this checkpoint of NeMo", where, value)
    by_rank: dict[tuple[int, int], RankedFile] = {}
    for file in files:
        by_rank[file.pipeline_rank, file.tensor_rank] = file
    num_stages = 1 + max(file.pipeline_rank for file in files)
    num_ranks = 1 + max(file.tensor_rank for file in files)
    if len(by_rank) != len(files) or len(files) != num_stages * num_ranks:
        value = (
            f"{len(files)} files for {num_ranks} tensor-parallel and {num_stages} pipeline ranks"
        )
        raise unusable("the files of some ranks are missing", where, value)
    return [[by_rank[stage, rank] for rank in range(num_ranks)] for stage in range(num_stages)]


def _merged_stage(
    ranks: Sequence[RankedFile], config: Mapping[str, Any], where: Path
) -> dict[str, Tensor]:
    parts = [item.model.tensors_in(item.file) for item in ranks]
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Tensor] = {}
    for name in parts[0]:
        missing = [rank for rank, tensors in enumerate(parts) if name not in tensors]
        if missing:
            raise unusable(f"rank {missing[0]} lacks a tensor of rank 0", where, name)
        merged[name] = _merged(name, [tensors[name] for tensors in parts], config, where)
    for rank, tensors in enumerate(parts):
        others = sorted(tensors.keys() - merged.keys())
        if others:
            raise unusable(f"rank {rank} has a tensor that rank 0 lacks", where, others[0])
    return merged


def _merged(name: str, parts: Sequence[Tensor], config: Mapping[str, Any], where: Path) -> Tensor:
    """Return the tensor that the ranks' *parts* make up."""
    first = parts[0]
    if any((part.dtype, part.shape) != (first.dtype, first.shape) for part in parts):
        value = f"{name}: {', '.join(str(list(part.shape)) for part in parts[:4])}"
        raise unusable("the parts of a tensor have different shapes or dtypes", where, value)
    rule = _rule(name, config)
    if rule is None:
        raise CheckpointUnusable(
            "there is no rule to merge this tensor of tensor-parallel ranks",
            where=str(where),
            value=name,
            hint=_HINT,
        )
    if rule == "equal":
        return first
    axis = 1 if rule == "row" else 0
    num_groups = 2 if rule == "gated column" else 1
    if len(first.shape) <= axis or first.shape[axis] % num_groups:
        raise unusable("a part of a tensor has another shape than its layer", where, name)
    return concatenated(parts, axis=axis, num_groups=num_groups)


def _rule(name: str, config: Mapping[str, Any]) -> Rule | None:
    if name.endswith(_MLP_IN):
        return "gated column" if _is_gated(name, config) else "column"
    if name.endswith(_COLUMN):
        return "column"
    if name.endswith(_ROW):
        return "row"
    if name.endswith(_EQUAL) or _NORM.fullmatch(name):
        return "equal"
    return None


def _is_gated(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether the first layer of an MLP has both matrices of a gated activation, gate first."""
    activation = str(config.get("activation", "gelu"))
    if not _GATED.fullmatch(activation):
        return False
    # Layers of NeMo's own, before Megatron-Core, have a second layer dense_h_to_4h_2 unless they are fused.
    return "linear_fc1" in name or activation.startswith("fast-")


def concatenated(parts: Sequence[Tensor], *, axis: int, num_groups: int = 1) -> Tensor:
    """Return the concatenation of *parts* along *axis*, as slices of the same files.

    All parts have one shape. With *num_groups*, each part consists of that many equal groups along axis 0, and the
    result has the first groups of all parts, then the second ones, and so on. The parts are contiguous (not
    interleaved).
    """
    first = parts[0]
    extent = first.shape[axis]
    shape = (*first.shape[:axis], extent * len(parts), *first.shape[axis + 1 :])
    group = extent // num_groups
    slices: list[Slice] = []
    for number, part in enumerate(parts):
        for stored in part.slices:
            for divided, index in _by_group(stored, axis, group):
                # Within its group, a rank's rows follow those of the ranks before it.
                begin = index * group * len(parts) + number * group
                offset = begin + divided.offsets[axis] - index * group
                offsets = (*divided.offsets[:axis], offset, *divided.offsets[axis + 1 :])
                slices.append(replace(divided, fqn=first.fqn, offsets=offsets))
    return Tensor(first.fqn, first.dtype, shape, tuple(slices))


def _by_group(stored: Slice, axis: int, group: int) -> Iterator[tuple[Slice, int]]:
    """Divide a slice at the boundaries of groups of *group* indices of *axis*; yield each part and its group."""
    begin = stored.offsets[axis]
    end = begin + stored.sizes[axis]
    if stored.nbytes == 0 or begin // group == (end - 1) // group:
        yield stored, (begin // group if group else 0)
        return
    assert axis == 0, "only groups of rows are contiguous in a slice"
    row_bytes = nbytes_of(stored.dtype, stored.sizes[1:])
    at = begin
    while at < end:
        index = at // group
        stop = min(end, (index + 1) * group)
        sizes = (stop - at, *stored.sizes[1:])
        start = stored.start + (at - begin) * stored.row_bytes
        offsets = (at, *stored.offsets[1:])
        nbytes = (stop - at) * row_bytes
        yield replace(stored, offsets=offsets, sizes=sizes, start=start, nbytes=nbytes), index
        at = stop


def _renamed(tensor: Tensor, name: str) -> Tensor:
    if tensor.fqn == name:
        return tensor
    return tensor.renamed(name)
