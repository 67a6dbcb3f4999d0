"""The arrangements in which Megatron-Core and NeMo store the same tensors, as one: a tensor for each layer and expert.

Source of the names: megatron-core 0.16 (files that it wrote), NeMo 1 and 2. A distributed checkpoint stacks layers
along a first dimension (``decoder.layers.mlp...`` of shape [layers, ...]) or stores each on its own
(``decoder.layers.0.mlp...``, with ``non_homogeneous_layers``). It stacks experts too, or stores them apart, and with
``singleton_local_shards`` stores gate and up as ``weight_w`` and ``weight_v``. Transformer Engine has the norm in the
linear layer that follows it, the local implementation in a module. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorDict, TensorMap
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of
from automodel_ckpt.convert.names.rules import RowRange, join_rows, stack, unstack
from automodel_ckpt.errors import unusable

# What wrappers and NeMo put before the names of the model.
_PREFIX = re.compile(
    r"(model\.|module\.)*(?=embedding\.|decoder\.|output_layer\.|rotary_pos_emb\.)", re.ASCII
)
# What a run stores in addition to the model: optimizers (chained if experts have their own), the state of each rank.
_OTHER_STATE = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
MOE_NORM = "decoder.layers.pre_mlp_layernorm.weight"
LOCAL_MLP_NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
"""The stacked norms before experts: the names in Transformer Engine's and in the local implementation."""
_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
_LAYER = re.compile(r"decoder\.layers\.(?:([0-9]{1,6})\.)?(.+)", re.ASCII)
_EXPERT = re.compile(
    r"mlp\.experts\.(?:experts|local_experts)\.(?:([0-9]{1,6})\.)?(linear_fc[12]\.weight(?:_[wv])?)",
    re.ASCII,
)
# Transformer Engine's grouped linear layer numbers the weights of its experts.
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)([0-9]{1,6})", re.ASCII)
# A tensor without elements could claim any number of layers.
_MAX_STACKED = 1 << 16
_MISMATCH = "these are not the tensors of a model of Megatron"
_HALVES = {"linear_fc1.weight_w": 0, "linear_fc1.weight_v": 1}


def is_model_tensor(name: str) -> bool:
    """Return whether *name*, as stored, names a weight, not optimizer state, a rank's state, or a buffer."""
    if "_extra_state" in name or name.startswith(_OTHER_STATE):
        return False
    return not without_prefix(name).startswith("rotary_pos_emb.")


def plain_names(tensors: TensorMap, where: str) -> TensorDict:
    """Return Megatron's *tensors* under one naming scheme: ``decoder.layers.0.mlp.experts.local_experts.3...``.

    Norms are under the names of Transformer Engine. Raises :class:`CheckpointUnusable` if two stored tensors are the
    same one, or half of a tensor is missing.
    """
    found = {}
    halves: dict[str, dict[int, Tensor]] = {}
    with faults_of(Path(where), _MISMATCH):
        for stored_name, tensor in tensors.items():
            for name, one in _unstacked(without_prefix(stored_name), tensor):
                suffix = next(filter(name.endswith, _HALVES), None)
                if suffix is not None:
                    whole = name.removesuffix(suffix) + "linear_fc1.weight"
                    halves.setdefault(whole, {})[_HALVES[suffix]] = one
                elif name not in found:
                    found[name] = one.renamed(name)
                elif not name.endswith(_MLP_NORM):
                    # Our exports of models with experts have the norm under both names.
                    raise Fault(f"a tensor is stored twice: {name}")
        for name, pair in halves.items():
            if len(pair) != 2 or name in found or pair[0].shape != pair[1].shape:
                raise Fault(f"the two halves of a tensor are not there or do not match: {name}")
            ranges = [RowRange(half, 0, pair[0].shape[0]) for half in (0, 1)]
            found[name] = join_rows(name, [pair[0], pair[1]], ranges)
    return found


def stacked_names(tensors: TensorMap, where: str) -> TensorDict:
    """Return tensors of :func:`plain_names` as a distributed checkpoint of megatron-core stores them by default.

    Layers are stacked along a first dimension, and experts along a second. All layers have the same tensors. Raises
    :class:`CheckpointUnusable` if their shapes or dtypes differ.
    """
    layers: dict[str, dict[int, dict[int, Tensor]]] = {}
    found = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None or match[1] is None:
            found[name] = tensor
            continue
        rest, expert = match[2], 0
        of_expert = _EXPERT.fullmatch(rest)
        if of_expert is not None and of_expert[1] is not None:
            rest, expert = f"mlp.experts.experts.{of_expert[2]}", int(of_expert[1])
        layers.setdefault(rest, {}).setdefault(int(match[1]), {})[expert] = tensor
    for rest, by_layer in layers.items():
        name = f"decoder.layers.{rest}"
        if len({(one.dtype, one.shape) for own in by_layer.values() for one in own.values()}) > 1:
            raise unusable(
                "the layers of the model have different dtypes or shapes", Path(where), name
            )
        rows = []
        for _, by_expert in sorted(by_layer.items()):
            own = [tensor for _, tensor in sorted(by_expert.items())]
            rows.append(stack(name, own) if _EXPERT.fullmatch(rest) else own[0])
        found[name] = stack(name, rows)
    return found


def without_prefix(name: str) -> str:
    """Return *name* without what wrappers and NeMo put before the names of the model."""
    prefix = _PREFIX.match(name)
    return name if prefix is None else name[prefix.end() :]


def _unstacked(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of single layers and experts that *tensor* consists of, by name."""
    match = _LAYER.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    rest = _NORMS.get(match[2], match[2])
    stacked = match[1] is None
    layers = enumerate(_checked_unstack(name, tensor)) if stacked else [(int(match[1]), tensor)]
    for layer, one in layers:
        prefix = f"decoder.layers.{layer}."
        for own, expert in _experts(rest, one):
            yield prefix + own, expert


def _experts(rest: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    prefix = "mlp.experts.local_experts."
    grouped = _GROUPED.fullmatch(rest)
    if grouped is not None:
        yield f"{prefix}{int(grouped[2])}.{grouped[1]}", tensor
        return
    match = _EXPERT.fullmatch(rest)
    if match is None:
        yield rest, tensor
    elif match[1] is not None:
        yield f"{prefix}{int(match[1])}.{match[2]}", tensor
    else:
        for expert, one in enumerate(_checked_unstack(rest, tensor)):
            yield f"{prefix}{expert}.{match[2]}", one


def _checked_unstack(name: str, tensor: Tensor) -> list[Tensor]:
    if not tensor.shape or tensor.shape[0] > _MAX_STACKED:
        shape = list(tensor.shape)
        raise Fault(f"this tensor does not stack layers or experts: {name} of shape {shape}")
    return unstack(tensor)
