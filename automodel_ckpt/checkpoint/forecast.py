"""How large a save will be, before there is one: so that a disk too small shows before training, not after hours."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.trees import module_state, trained_by_all, whole_of

# Per slice: its entry in the manifest and in a shard's header or in DCP's .metadata.
_ENTRY_BYTES = 450
_SIDE_FILES_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that one save is expected to take, its export included where each save makes one, and those free now."""

    nbytes: int
    free_bytes: int

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


def forecast_bytes(
    items: Iterable[Item], *, world_size: int, save_optimizer: bool, num_exports: int = 0,
    states: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:  # fmt: skip
    """Expected bytes of one checkpoint of these items on *world_size* ranks; *states* are the modules' state dicts, by
    attribute, where they are at hand.

    Counted from shapes and dtypes; the state of an optimizer that has made no step yet is found by trying a step on
    parameters of the same kind with a few elements each.
    """
    total = _SIDE_FILES_BYTES
    for item in items:
        if item.kind == "module":
            whole = whole_of(item.value)
            mine = (states or {}).get(item.name) or module_state(item.value)[0]
            state = mine if whole is None else whole.tensors
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            weights = sum(map(_nbytes, tensors))
            total += weights * (1 + num_exports) + sum(_slices(t, world_size) for t in tensors) * _ENTRY_BYTES
        elif item.kind == "optimizer" and save_optimizer:
            total += int(sum(_optimizer_bytes(item.value, world_size)) * _times(item.value))
    return total


def _nbytes(tensor: torch.Tensor) -> int:
    """Of the whole tensor, whatever part of it is here."""
    return tensor.numel() * tensor.element_size()


def _slices(tensor: torch.Tensor, world_size: int) -> int:
    return world_size if isinstance(tensor, DTensor) else 1


def _times(optimizer: Optimizer) -> float:
    """How many times what this rank trains all ranks train together, where others train other parameters."""
    whole = trained_by_all(optimizer)
    if whole is None:
        return 1.0
    mine = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    together = sum(tensor.numel() for group in whole for tensor in group.values())
    return float(together / max(mine, 1))


def _optimizer_bytes(optimizer: Optimizer, world_size: int) -> Iterator[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slices = _slices(parameter, world_size)
            for ratio, itemsize in _state_entries(optimizer, group, parameter):
                if ratio is None:
                    yield itemsize + _ENTRY_BYTES + archive_overhead()
                else:
                    whole = int(parameter.numel() * ratio) * itemsize
                    yield whole + slices * (_ENTRY_BYTES + archive_overhead())


def _state_entries(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Iterator[tuple[float | None, int]]:
    """(elements per parameter element, bytes per element) of each state entry; None for one of a single element."""
    state = optimizer.state.get(parameter)
    model: torch.Tensor = parameter
    if not state:
        model = nn.Parameter(torch.zeros([min(extent, 2) for extent in parameter.shape], dtype=parameter.dtype))
        state = _state_after_a_step(optimizer, group, model)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield (None if value.dim() == 0 else value.numel() / max(model.numel(), 1)), value.element_size()


def _state_after_a_step(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
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
