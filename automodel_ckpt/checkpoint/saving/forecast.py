"""Estimate the size of a save before the first one, so that a disk that is too small is reported before training."""

from __future__ import annotations

import functools
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.manifest import MAX_BYTES
from automodel_ckpt.checkpoint.module_tensors import module_state, stored_layout
from automodel_ckpt.checkpoint.state.optimizer_names import trained_by_all
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.units import size_text

# Per slice: its entry in the manifest, and that in a shard's header or in DCP's .metadata.
_ENTRY_BYTES = {"module": 380, "optimizer": 850}
# The rest of the manifest, config.yaml, losses.json, consolidate.sh; a shard's header is padded to a block.
_FIXED_BYTES, _PADDING_BYTES = 10_240, 2048
_VALUE_BYTES = 16
# Text of an entry in the manifest besides its name, its file's name and its extents: per tensor, and per slice.
_TENSOR_TEXT_BYTES, _SLICE_TEXT_BYTES = 48, 132
_FILE_NAME_BYTES = {"module": 60, "optimizer": 28}
# Extents of a parameter on which an optimizer is tried.
_FEW = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that one save is expected to take, its export included where each save makes one, and those free now.

    *export_bytes* is the size of one export, 0 where nothing is exported.
    """

    nbytes: int
    free_bytes: int
    export_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.free_bytes


def free_bytes(directory: Path) -> int:
    """Free to this user on the file system that *directory* is, or will be, on."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def check_manifest_size(num_bytes: int) -> None:
    """Raise :class:`RecipeError` where a manifest of *num_bytes* would be too large to be read."""
    if num_bytes > MAX_BYTES:
        raise RecipeError(
            "the checkpoints of this run could not be read back: their manifest would be too large",
            where=layout.MANIFEST,
            value=f"about {size_text(num_bytes)}; at most {size_text(MAX_BYTES)} are read",
            hint="the manifest has one entry for each shard of each tensor, of the model and the optimizer: shard "
            "over fewer ranks (distributed.dp_replicate_size), or leave the optimizer out "
            "(checkpoint.save_optimizer: false)",
        )


def forecast_manifest_bytes(
    items: Iterable[Item],
    *,
    save_optimizer: bool,
    states: Mapping[str, Mapping[str, Any]] | None = None,
    num_shards: int | None = None,
) -> int:
    """Expected bytes of the manifest of one checkpoint of these items; the arguments are those of
    :func:`forecast_bytes`."""
    items = list(items)
    total, names = _FIXED_BYTES, dict[int, str]()
    for item in items:
        if item.kind != "module":
            continue
        names |= {id(parameter): name for name, parameter in item.value.named_parameters()}
        for name, value in _module_tensors(item, states).items():
            total += _entry_text_bytes(
                "module", name, tuple(value.shape), _slices(value, num_shards)
            )
    for item in items:
        if item.kind == "optimizer" and save_optimizer:
            entries = _optimizer_text_bytes(item.value, names, num_shards)
            total += int(sum(entries) * _times(item.value))
    return total


def _module_tensors(
    item: Item, states: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, torch.Tensor]:
    """The tensors of a module's state by name; where this rank has a stage of it, those of all stages."""
    complete = stored_layout(item.value).complete
    state: Mapping[str, Any] | None = (states or {}).get(item.name)
    if complete is not None:
        state = complete.tensors
    elif state is None:
        state, _ = module_state(item.value)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _optimizer_text_bytes(
    optimizer: Optimizer, names: Mapping[int, str], num_shards: int | None
) -> Iterator[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = f"state.{names.get(id(parameter), '')}"
            for key, numel, _ in _state_entries(optimizer, group, parameter):
                shape = () if numel is None else tuple(parameter.shape)
                slices = 1 if numel is None else _slices(parameter, num_shards)
                yield _entry_text_bytes("optimizer", f"{prefix}.{key}", shape, slices)


def _entry_text_bytes(kind: str, name: str, shape: tuple[int, ...], num_slices: int) -> int:
    """Bytes of a tensor's entry in the manifest."""
    extents = sum(len(str(extent)) + 1 for extent in shape)
    per_slice = _SLICE_TEXT_BYTES + _FILE_NAME_BYTES[kind] + 2 * extents
    return len(json.dumps(name)) + _TENSOR_TEXT_BYTES + extents + num_slices * per_slice


def forecast_bytes(
    items: Iterable[Item],
    *,
    world_size: int,
    save_optimizer: bool,
    num_exports: int = 0,
    states: Mapping[str, Mapping[str, Any]] | None = None,
    side_bytes: int = 0,
    num_shards: int | None = None,
) -> int:
    """Expected bytes of one checkpoint of *items* on *world_size* ranks.

    *states* are the modules' state dicts by attribute, where available. *side_bytes* is the size of the files beside
    the weights (config, tokenizer), counted once for the checkpoint and once for each of *num_exports*. *num_shards*
    is the number of shards of a tensor that is not sharded yet.

    Computed from shapes and dtypes. The state of an optimizer without state is found by a trial step on parameters
    with few elements.
    """
    total = _FIXED_BYTES + side_bytes * (1 + num_exports)
    for item in items:
        if item.kind == "module":
            tensors = _module_tensors(item, states).values()
            slices = sum(_slices(t, num_shards) for t in tensors)
            total += sum(map(_nbytes, tensors)) * (1 + num_exports)
            total += slices * _ENTRY_BYTES["module"] + world_size * _PADDING_BYTES
        elif item.kind == "optimizer" and save_optimizer:
            total += int(sum(_optimizer_bytes(item.value, num_shards)) * _times(item.value))
        elif item.kind == "object":
            files = 1 if item.scope == "replicated" else world_size
            total += files * _object_bytes(item.value.state_dict())
    return total


def _object_bytes(value: Any) -> int:
    """Expected bytes of the file with the state of one object."""
    return archive_overhead() + _plain_bytes(value)


def _plain_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return _nbytes(value) + archive_overhead() // 4
    if isinstance(value, np.ndarray):
        return value.nbytes + archive_overhead() // 4
    if isinstance(value, Mapping):
        return sum(_plain_bytes(key) + _plain_bytes(element) for key, element in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(_plain_bytes, value))
    return len(value) if isinstance(value, str | bytes | bytearray) else _VALUE_BYTES


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole tensor, not only of this rank's shard."""
    return tensor.numel() * tensor.element_size()


def _slices(tensor: torch.Tensor, num_shards: int | None) -> int:
    """The number of non-empty shards of a tensor; a dimension shorter than the mesh leaves some empty."""
    if isinstance(tensor, DTensor):
        cuts = [
            min(tensor.device_mesh.size(i), tensor.shape[placement.dim])
            for i, placement in enumerate(tensor.placements)
            if isinstance(placement, Shard)
        ]
        return max(1, math.prod(cuts))
    return max(1, min(num_shards or 1, tensor.shape[0])) if tensor.dim() else 1


def _times(optimizer: Optimizer) -> float:
    """The elements that all ranks train, divided by those that this rank trains; 1.0 where both are the same."""
    whole = trained_by_all(optimizer)
    if whole is None:
        return 1.0
    mine = sum(
        parameter.numel() for group in optimizer.param_groups for parameter in group["params"]
    )
    together = sum(tensor.numel() for group in whole for tensor in group.values())
    return float(together / max(mine, 1))


def _optimizer_bytes(optimizer: Optimizer, num_shards: int | None) -> Iterator[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _ENTRY_BYTES["optimizer"] + archive_overhead()
            for _, numel, itemsize in _state_entries(optimizer, group, parameter):
                slices = 1 if numel is None else _slices(parameter, num_shards)
                yield (numel or 1) * itemsize + slices * entry


def _state_entries(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Iterator[tuple[str, int | None, int]]:
    """(name, elements, bytes per element) of each state entry; elements None for one without dimensions."""
    state, tried = optimizer.state.get(parameter), list(parameter.shape)
    if not state:
        # No two extents are alike, so that those of what an optimizer keeps per row or column tell which it is.
        tried = [
            few if extent > 1 else extent
            for extent, few in zip(parameter.shape, _FEW, strict=False)
        ]
        state = _state_after_a_step(
            optimizer, group, nn.Parameter(torch.zeros(tried, dtype=parameter.dtype))
        )
    grown = dict(zip(tried, parameter.shape, strict=False))
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            alike = value.numel() == math.prod(tried)
            numel = (
                parameter.numel()
                if alike
                else math.prod(grown.get(extent, extent) for extent in value.shape)
            )
            yield name, (None if value.dim() == 0 else numel), value.element_size()


def _state_after_a_step(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name in optimizer.defaults}
    try:
        trial = type(optimizer)([parameter], **options)
        parameter.grad = torch.zeros_like(parameter)
        trial.step()
    except Exception:  # an optimizer that asks for more than parameters and its defaults: assume AdamW's two moments
        return {"first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
    return dict(trial.state[parameter])


@functools.cache
def archive_overhead() -> int:
    """Bytes that ``torch.save`` adds to a tensor's own."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(16), buffer)
    return buffer.tell() - 64
