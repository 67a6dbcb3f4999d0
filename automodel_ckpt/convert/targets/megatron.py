"""A checkpoint's model as a distributed checkpoint of Megatron-Core: verified, streamed, published. Imports no torch.

The output is a directory that Megatron-LM loads with ``--load``: ``latest_checkpointed_iteration.txt`` with the text
``release``, the model's config.json and tokenizer, and ``release/`` with the backend ``torch_dist``
(``dist_checkpointing.load`` of megatron-core 0.16 reads it). Layers are stacked along a first dimension, and experts
along a second, as sharded_state_dict() does by default. A model of any tensor, pipeline or expert parallelism reads its
parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from automodel_ckpt.checkpoint.export.files import write_side_files
from automodel_ckpt.checkpoint.export.plan import ExportTensor
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.slices import Tensor, nbytes_of
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import (
    ArchiveTensor,
    write_torch_archive,
)
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.names.conversion import Conversion, conversion_in, required_conversion
from automodel_ckpt.convert.names.megatron_names import (
    LOCAL_MLP_NORM,
    MOE_NORM,
    stacked_names,
)
from automodel_ckpt.convert.targets.dcp import DATA_FILE, DcpWriter
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.errors import RecipeError

_LATEST = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# The version of Megatron-LM's checkpoints since 2021: queries, keys and values are fused by query group.
_CHECKPOINT_VERSION = 3.0
_MAX_MULTIPLE = 1 << 20
# Modules with state for FP8. Megatron-Core stores this state next to the weights, and requires it when it loads. Which
# modules have it depends on the implementation (local or Transformer Engine). More than it asks for are ignored.
_LAYER_MODULES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
)
_MLP_MODULES = ("mlp.linear_fc1", "mlp.linear_fc2")
_EXPERT_MODULES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


def write(export: Export, *, vocabulary_multiple: int = 1, num_threads: int = 5) -> ExportReport:
    """Write the model for Megatron-Core.

    The embedding and the output layer are padded with rows of zeros to a multiple of *vocabulary_multiple* rows.
    """
    if not 0 < vocabulary_multiple <= _MAX_MULTIPLE:
        raise RecipeError(
            f"the rows of the vocabulary must be a multiple of 1 to {_MAX_MULTIPLE}",
            "ckpt export --vocabulary-multiple",
            vocabulary_multiple,
            "use Megatron's --make-vocab-size-divisible-by times the tensor parallel size, for example 128",
        )
    opened = export.source
    export.directory("-megatron")
    # Tensors are written in parts of the stored slices, which have no digests.
    export.check(reads_parts=True, num_threads=num_threads)
    side = opened.config_directory
    conversion = required_conversion(conversion_in(side), side)
    export.check_language_model(read_json(side, "config.json") or {}, "Megatron-Core")
    plan = export.plan()
    export.log_casts(plan.casts)
    beside, _ = export.side_files(plan)
    # The index of Hugging Face files, which are not written here.
    beside.pop(layout.HF_INDEX, None)
    state_dict = _state_dict(opened, plan.tensors, conversion, vocabulary_multiple)
    with export.published_directory() as directory:
        (directory / _LATEST).write_text(_RELEASE)
        # The config and the tokenizer, which Megatron-LM does not read: for users, and to convert the names back.
        write_side_files(beside, directory)
        _write(directory / _RELEASE, state_dict, conversion)
    return export.report(len(state_dict), checkpoint=str(export.target / _RELEASE))


# ---------------------------------------------------------------- tensors


def _state_dict(
    source: Source,
    exported: Iterable[ExportTensor],
    conversion: Conversion,
    vocabulary_multiple: int,
) -> dict[str, ArchiveTensor]:
    """Return Megatron's tensors by name: each is read when it is written."""
    where = str(source.model_directory)
    tensors = {}
    # Tensors without slices, to convert the dtypes of the export in the same way.
    cast = {}
    for tensor in exported:
        tensors[tensor.fqn] = tensor.stored.renamed(tensor.fqn)
        cast[tensor.fqn] = Tensor(tensor.fqn, tensor.dtype, tensor.stored.shape, ())
    converter, dimensions = conversion.converter, conversion.dimensions
    converted = converter.from_hugging_face(
        tensors, dimensions, where, vocabulary_multiple=vocabulary_multiple
    )
    stacked = stacked_names(converted.tensors, where)
    dtypes = stacked_names(converter.from_hugging_face(cast, dimensions, where).tensors, where)
    found = {}
    for name, stored in stacked.items():
        dtype, zero_rows = dtypes[name].dtype, converted.zero_rows.get(name, 0)
        shape = stored.shape
        num_zeros = 0
        if zero_rows:
            num_zeros = nbytes_of(dtype, (zero_rows, *shape[1:]))
            shape = (shape[0] + zero_rows, *shape[1:])
        blocks = partial(tensor_blocks, source.root, stored, dtype, num_zeros=num_zeros)
        found[name] = ArchiveTensor(dtype, shape, blocks)
    if dimensions.num_experts and LOCAL_MLP_NORM in found:
        # Before experts, Transformer Engine has the norm in a module. The local implementation uses the other name.
        found[MOE_NORM] = found[LOCAL_MLP_NORM]
    return found


# ---------------------------------------------------------------- files


def _write(
    directory: Path, state_dict: Mapping[str, ArchiveTensor], conversion: Conversion
) -> None:
    directory.mkdir()
    with open(directory / DATA_FILE, "wb") as data:
        writer = DcpWriter(data)
        for name, tensor in state_dict.items():
            writer.add_tensor((name,), tensor)
        for name in _extra_states(conversion):
            writer.add_value((name,), [None])
        writer.finish(directory)
    with (directory / "common.pt").open("wb") as file:
        write_torch_archive(file, {"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0})
    (directory / "metadata.json").write_text(json.dumps(_METADATA))


def _extra_states(conversion: Conversion) -> Iterable[str]:
    """Yield the keys of the modules' states for FP8. None is the state of a module without FP8."""
    dimensions = conversion.dimensions
    num_layers, num_experts = dimensions.num_layers, dimensions.num_experts
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    modules = _LAYER_MODULES if num_experts else (*_LAYER_MODULES, *_MLP_MODULES)
    for module in modules:
        for layer in range(num_layers):
            yield f"decoder.layers.{module}._extra_state/shard_{layer}_{num_layers}"
    if not num_experts:
        return
    for module in _EXPERT_MODULES:
        for layer in range(num_layers):
            for expert in range(num_experts):
                shard = f"shard_{layer}.{expert}_{num_layers}.{num_experts}"
                yield f"decoder.layers.{module}._extra_state/{shard}"
