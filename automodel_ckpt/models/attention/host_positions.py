"""The positions of packed rows as the host knows them, so that it makes masks without waiting for the device.

transformers reads the position ids of a row to find its samples, and :mod:`~automodel_ckpt.models.attention.documents`
reads where they begin. On a GPU, each of these waits for all work that is queued. The GPU is then idle until the host
has queued the next layers: for most of the update of the weights, if queueing a step takes longer than computing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from automodel_ckpt.base.device_copies import to_device

_FIND = "find_packed_sequence_indices"
"""transformers' function that returns, for position ids [B, T], the number of the sample of each token. None when each
row is one sample."""


@dataclass(eq=False)
class _Pair:
    """A tensor on a device, and its values on the host."""

    on_device: Tensor
    on_host: Tensor
    versions: tuple[int, int]
    samples: _Pair | None = None
    """The numbers of the samples that were found in these position ids. Not beside them: another thread may note
    others meanwhile."""

    @staticmethod
    def of(on_device: Tensor, on_host: Tensor) -> _Pair | None:
        """The pair of both tensors. None when *on_host* is not on the host, or if a change of a value may be missed."""
        # Tensors of inference mode have no version, by which a change of their values is seen.
        if on_device.is_inference() or on_host.is_inference():
            return None
        if on_device.is_cpu or not on_host.is_cpu:
            return None
        return _Pair(on_device, on_host, (on_device._version, on_host._version))

    def is_of(self, tensor: Tensor) -> bool:
        """Whether *tensor* is the tensor on the device or a view of all of it, and has its values still."""
        known = self.on_device
        if tensor is not known:
            bases = [each if each._base is None else each._base for each in (tensor, known)]
            layouts = [
                (each.dtype, each.shape, each.stride(), each.storage_offset())
                for each in (tensor, known)
            ]
            if bases[0] is not bases[1] or layouts[0] != layouts[1]:
                return False
        return self.is_unchanged()

    def is_unchanged(self) -> bool:
        """Whether both tensors have the values that they had when they were paired."""
        return (self.on_device._version, self.on_host._version) == self.versions


_newest: list[_Pair] = []
"""The position ids of the newest rows, if the host knows them."""


def note_positions(on_device: Tensor, on_host: Tensor) -> None:
    """Let the next forward pass know that the position ids *on_device* have the values *on_host*."""
    _install()
    pair = _Pair.of(on_device, on_host)
    _newest[:] = [] if pair is None else [pair]


def on_host(mask_function: Callable[..., Any]) -> Callable[..., Any] | None:
    """*mask_function* for positions on the host. None when it may read tensors that only the device has."""
    pairs: list[_Pair] = []
    for positions in _newest:
        pairs += [positions] if positions.samples is None else [positions, positions.samples]
    if not pairs:
        return None

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            for pair in pairs:
                if pair.is_of(value):
                    return pair.on_host
        # Not strings, which may name a device.
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise _UnknownValue

    try:
        found: Callable[..., Any] = _with_values(mask_function, replaced)
    except (_UnknownValue, ValueError, RecursionError):
        # A cell without content raises ValueError. A function may contain itself.
        return None
    return found


def _with_values(function: Any, replaced: Callable[[Any], Any]) -> Any:
    """A copy of a mask function with ``replaced(value)`` in place of each value in its closure and its default
    arguments, and in the functions that it joins."""
    if isinstance(function, tuple):
        return tuple(_with_values(each, replaced) for each in function)
    if not isinstance(function, FunctionType):
        return replaced(function)
    cells = []
    for cell in function.__closure__ or ():
        content = _with_values(cell.cell_contents, replaced)
        cells.append(CellType(content))
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        _with_values(function.__defaults__ or (), replaced),
        tuple(cells) or None,
    )
    by_name = function.__kwdefaults__ or {}
    copied.__kwdefaults__ = {name: _with_values(by_name[name], replaced) for name in by_name}
    return copied


class _UnknownValue(Exception):
    """A mask function contains something with values that may be on the device only."""


@functools.cache
def _install() -> None:
    """Let transformers find the samples of known rows on the host, for all models of the process."""
    find: Any = getattr(masking_utils, _FIND, None)
    if find is None:
        return

    @functools.wraps(find)
    def find_known(position_ids: Tensor) -> Tensor | None:
        known = [] if torch.compiler.is_compiling() else [*_newest]
        if not known or not known[0].is_of(position_ids):
            return find(position_ids)  # type: ignore[no-any-return]
        positions = known[0]
        samples = positions.samples
        if samples is not None and samples.is_unchanged():
            return samples.on_device
        numbers = find(positions.on_host)
        if numbers is None:
            return None
        on_device = to_device(numbers, position_ids.device)
        positions.samples = _Pair.of(on_device, numbers)
        return on_device

    setattr(masking_utils, _FIND, find_known)
