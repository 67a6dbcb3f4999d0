"""Estimate the size of a save before the first one, so that a disk that is too small is reported before training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.pickles.pickle_values import saved
from automodel_ckpt.checkpoint.state.module_tensors import module_state, stored_layout
from automodel_ckpt.checkpoint.state.optimizer_names import trained_by_all
from automodel_ckpt.checkpoint.state.optimizer_state import check_flat
from automodel_ckpt.checkpoint.state.storable import check_safe

# The entries of a tensor in the manifest and in a header; of an optimizer also its archive and entry in .metadata.
_MODULE_ENTRY, _OPTIMIZER_ENTRY = 380, 2000
# The rest of the manifest, config.yaml, losses.json, consolidate.sh; and of each rank, what a header is padded to.
_FIXED_BYTES, _PADDING_BYTES = 10_240, 2048
# The largest extent of the parameter for a trial step.
_TRIAL_EXTENT = 2


@dataclass(frozen=True)
class Forecast:
    """Expected bytes of one save, with its export where each save makes one, and the bytes that are free now."""

    nbytes: int
    free_bytes: int


def free_bytes(directory: Path) -> int:
    """Bytes that this user may write to the file system of *directory*, which need not exist yet."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    # Not f_bfree, which includes the blocks that only root may use.
    return status.f_bavail * status.f_frsize


def forecast_bytes(
    items: Iterable[Item],
    *,
    world_size: int,
    save_optimizer: bool,
    side_bytes: int = 0,
) -> int:
    """Expected bytes of one checkpoint of *items* on *world_size* ranks.

    *side_bytes* is the size of the files beside the weights (config, tokenizer).

    Computed from shapes and dtypes. The state of an optimizer without state is found by a trial step on parameters
    with few elements.
    """
    total = _FIXED_BYTES + side_bytes
    for item in items:
        if item.kind == "module":
            complete = stored_layout(item.value).complete
            # Of all ranks, if this rank has a stage of the module.
            state = module_state(item.value)[0] if complete is None else complete.tensors
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    # Of the whole tensor, not only of this rank's shard.
                    total += tensor.numel() * tensor.element_size() + _MODULE_ENTRY
            total += world_size * _PADDING_BYTES
        elif item.kind == "optimizer" and save_optimizer:
            total += _optimizer_bytes(item)
        elif item.kind == "object":
            num_files = 1 if item.scope == "replicated" else world_size
            content = item.value.state_dict()
            check_safe(item.name, content)
            total += num_files * len(saved(content))
    return total


def _optimizer_bytes(item: Item) -> int:
    groups, here, total = item.value.param_groups, 0, 0
    for group in groups:
        for parameter in group["params"]:
            here += parameter.numel()
            total += sum(
                nbytes + _OPTIMIZER_ENTRY for nbytes in _state_entries(item, group, parameter)
            )
    if (trained := trained_by_all(item.value)) is None:
        return total
    # This rank trains a part of what all ranks train.
    of_all = sum(tensor.numel() for group in trained for tensor in group.values())
    return int(total * of_all / max(here, 1))


def _state_entries(item: Item, group: ValueDict, parameter: torch.Tensor) -> Iterator[int]:
    """Yield the bytes of each state entry that is a tensor.

    After a trial step, state for each row or column counts as state of the trial's few rows. Raises
    :class:`RecipeError` for state that a checkpoint cannot store.
    """
    optimizer = _optimizer_of(item.value, group)
    state, owner = optimizer.state.get(parameter), parameter
    if not state and hasattr(optimizer, "state_like"):
        # If the state depends on the size of a parameter, the optimizer describes it, in tensors without values.
        state = optimizer.state_like(parameter)
    elif not state:
        shape = [min(extent, _TRIAL_EXTENT) for extent in parameter.shape]
        owner = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device="cpu"))
        state = _state_after_a_step(optimizer, group, owner)
    check_flat(item.name, {"state": {"*": state}, "param_groups": ()})
    for value in state.values():
        if isinstance(value, torch.Tensor):
            is_full = value.dim() and value.numel() == owner.numel()
            numel = parameter.numel() if is_full else value.numel()
            yield numel * value.element_size()


def _optimizer_of(optimizer: Optimizer, group: ValueDict) -> Optimizer:
    """The optimizer that updates *group*: one of those that *optimizer* combines, or *optimizer*."""
    parts = [*getattr(optimizer, "optimizers", ()), optimizer]
    return next(
        (each for each in parts if any(mine is group for mine in each.param_groups)), optimizer
    )


def _state_after_a_step(
    optimizer: Optimizer, group: ValueDict, parameter: torch.Tensor
) -> ValueDict:
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
