"""Estimate the size of a save before the first one, so that a disk that is too small is reported before training."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.pickles.pickle_values import saved
from automodel_ckpt.checkpoint.state.module_tensors import module_state, stored_layout
from automodel_ckpt.checkpoint.state.optimizer_names import trained_by_all
from automodel_ckpt.checkpoint.state.optimizer_state import check_flat
from automodel_ckpt.checkpoint.state.storable import check_safe

# Per slice: its entry in the manifest, and that in a shard's header or in DCP's .metadata.
_ENTRY_BYTES = {"module": 380, "optimizer": 850}
# The rest of the manifest, config.yaml, losses.json, consolidate.sh; a shard's header is padded to a block.
_FIXED_BYTES, _PADDING_BYTES = 10_240, 2048
# Extents of the parameter for a trial step. They differ, so that the extents of state that an optimizer has per row or
# per column show which dimension they belong to.
_TRIAL_EXTENTS = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected bytes of one save, with its export where each save makes one, and the bytes that are free now.

    *export_bytes* is the size of one export, 0 where nothing is exported.
    """

    nbytes: int
    free_bytes: int
    export_bytes: int = 0


def free_bytes(directory: Path) -> int:
    """Bytes that this user may write to the file system of *directory*, which need not exist yet."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    # Not f_bfree, which includes the blocks that only root may use.
    return status.f_bavail * status.f_frsize


def _module_tensors(
    item: Item, states: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, torch.Tensor]:
    """The tensors of a module's state by name; where this rank has a stage of it, the tensors of all stages."""
    complete = stored_layout(item.value).complete
    state: Mapping[str, Any] | None = (states or {}).get(item.name)
    if complete is not None:
        state = complete.tensors
    elif state is None:
        state, _ = module_state(item.value)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def forecast_bytes(
    items: Iterable[Item],
    *,
    world_size: int,
    save_optimizer: bool,
    states: Mapping[str, Mapping[str, Any]] | None = None,
    side_bytes: int = 0,
    num_shards: int | None = None,
) -> int:
    """Expected bytes of one checkpoint of *items* on *world_size* ranks.

    *states* are the modules' state dicts by attribute, where available. *side_bytes* is the size of the files beside
    the weights (config, tokenizer). *num_shards* is the number of shards of a tensor that is not sharded yet.

    Computed from shapes and dtypes. The state of an optimizer without state is found by a trial step on parameters
    with few elements.
    """
    total = _FIXED_BYTES + side_bytes
    for item in items:
        if item.kind == "module":
            for tensor in _module_tensors(item, states).values():
                # Of the whole tensor, not only of this rank's shard.
                total += tensor.numel() * tensor.element_size()
                total += _num_slices(tensor, num_shards) * _ENTRY_BYTES["module"]
            total += world_size * _PADDING_BYTES
        elif item.kind == "optimizer" and save_optimizer:
            mine = sum(_optimizer_bytes(item, num_shards))
            total += int(mine * _share_factor(item.value))
        elif item.kind == "object":
            num_files = 1 if item.scope == "replicated" else world_size
            state = item.value.state_dict()
            check_safe(item.name, state)
            total += num_files * len(saved(state))
    return total


def _num_slices(tensor: torch.Tensor, num_shards: int | None) -> int:
    """The number of non-empty shards of a tensor; a dimension shorter than the mesh leaves some empty."""
    if isinstance(tensor, DTensor):
        num_slices = 1
        for mesh_dim, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                num_ranks = tensor.device_mesh.size(mesh_dim)
                num_slices *= min(num_ranks, tensor.shape[placement.dim])
        return max(1, num_slices)
    if tensor.dim() == 0:
        return 1
    # Not sharded yet: fully_shard shards dimension 0.
    return max(1, min(num_shards or 1, tensor.shape[0]))


def _share_factor(optimizer: Optimizer) -> float:
    """The elements that all ranks train, divided by those that this rank trains; 1.0 where both are the same."""
    trained = trained_by_all(optimizer)
    if trained is None:
        return 1.0
    here = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    total = sum(tensor.numel() for group in trained for tensor in group.values())
    return float(total / max(here, 1))


def _optimizer_bytes(item: Item, num_shards: int | None) -> Iterator[int]:
    for group in item.value.param_groups:
        for parameter in group["params"]:
            entry = _ENTRY_BYTES["optimizer"] + archive_overhead()
            for numel, itemsize in _state_entries(item, group, parameter):
                num_slices = 1 if numel is None else _num_slices(parameter, num_shards)
                yield (numel or 1) * itemsize + num_slices * entry


def _state_entries(
    item: Item, group: dict[str, Any], parameter: torch.Tensor
) -> Iterator[tuple[int | None, int]]:
    """Yield (elements, bytes per element) of each state entry; elements None for one without dimensions.

    Raises :class:`RecipeError` for state that a checkpoint cannot store.
    """
    optimizer = _optimizer_of(item.value, group)
    state = optimizer.state.get(parameter)
    shape = list(parameter.shape)
    if not state and hasattr(optimizer, "state_like"):
        # If the state depends on the size of a parameter, the optimizer describes it, in tensors without values.
        state = optimizer.state_like(parameter)
    elif not state:
        pairs = zip(parameter.shape, _TRIAL_EXTENTS, strict=False)
        shape = [trial if extent > 1 else extent for extent, trial in pairs]
        trial_parameter = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device="cpu"))
        state = _state_after_a_step(optimizer, group, trial_parameter)
    check_flat(item.name, {"state": {"*": state}, "param_groups": ()})
    real_extent = dict(zip(shape, parameter.shape, strict=False))
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            continue
        numel: int | None = None
        if value.dim() and value.numel() == math.prod(shape):
            numel = parameter.numel()
        elif value.dim():
            numel = math.prod(real_extent.get(extent, extent) for extent in value.shape)
        yield numel, value.element_size()


def _optimizer_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """The optimizer that updates *group*: one of those that *optimizer* combines, or *optimizer*."""
    for part in getattr(optimizer, "optimizers", ()):
        if any(each is group for each in part.param_groups):
            found: Optimizer = part
            return found
    return optimizer


def _state_after_a_step(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """The state of *parameter* after one step with the optimizer's class and the options of *group*."""
    # LR schedulers add keys to the groups (initial_lr) that the constructor rejects.
    options = {name: value for name, value in group.items() if name in optimizer.defaults}
    try:
        trial = type(optimizer)([parameter], **options)
        parameter.grad = torch.zeros_like(parameter)
        trial.step()
    except Exception:
        # An optimizer that needs more than parameters and its defaults: assume AdamW's two moments.
        return {"first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
    return dict(trial.state[parameter])


@functools.cache
def archive_overhead() -> int:
    """Bytes that ``torch.save`` adds to the bytes of a tensor."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(16, device="cpu"), buffer)
    # The 16 float32 elements take 64 bytes.
    return buffer.tell() - 64
