"""Positions of packed rows: as the host knows them, of image tokens, and as biases (T5)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
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
    samples: _Pair | None = None
    """The numbers of the samples that were found in these position ids. Not next to them: another thread may note
    others meanwhile."""

    def __post_init__(self) -> None:
        self._versions = self._current_versions()

    def _current_versions(self) -> tuple[int, int]:
        return self.on_device._version, self.on_host._version

    @staticmethod
    def of(on_device: Tensor, on_host: Tensor) -> _Pair | None:
        """The pair of both tensors. None when *on_host* is not on the host, or if a change of a value may be missed."""
        # Tensors of inference mode have no version, by which a change of their values is seen.
        if on_device.is_inference() or on_host.is_inference():
            return None
        if on_device.is_cpu or not on_host.is_cpu:
            return None
        return _Pair(on_device, on_host)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether *tensor* is the tensor on the device or a view of all of it, and has its values still."""
        # A view of all of it has the same version.
        return self.is_unchanged() and (
            tensor is self.on_device or _layout(tensor) == _layout(self.on_device)
        )

    def is_unchanged(self) -> bool:
        """Whether both tensors have the values that they had when they were paired."""
        return self._current_versions() == self._versions


def _layout(tensor: Tensor) -> Sequence[object]:
    """What two views of the same values have in common."""
    base = tensor if tensor._base is None else tensor._base
    place = (tensor.shape, tensor.stride(), tensor.storage_offset())
    return (id(base), tensor.dtype, *place)


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


PositionsOf = Callable[[Mapping[str, Tensor]], Tensor]


def rotary_positions(model: nn.Module) -> PositionsOf | None:
    """Return a function that computes the positions [3, samples, L] of a padded batch.

    transformers' models call it themselves for a batch with one sample per row, but not for rows with several samples.
    Returns None when the positions are a text's positions.
    """
    for module in model.modules():
        method: Any = getattr(module, "get_rope_index", None)
        if callable(method):
            return functools.partial(_positions, method, inspect.signature(method).parameters)
    return None


def _positions(
    method: Callable[..., Any], names: Collection[str], batch: Mapping[str, Tensor]
) -> Tensor:
    """Call a model's ``get_rope_index`` with those tensors of a batch that it takes."""
    positions: Tensor
    positions, _ = method(**{name: tensor for name, tensor in batch.items() if name in names})
    return positions


_NAME = "relative_attention_bias"


def lay_out_position_biases(model: nn.Module) -> int:
    """Let *model* compute its position biases so that fused attention accepts them; returns the number of layers.

    transformers gets the biases of all heads [1, H, Tq, Tk] by transposing what an embedding returns, [Tq, Tk, H]. A
    row of such a view has gaps, and memory-efficient attention needs rows without gaps: PyTorch would compute plain
    products, and keep the scores of all pairs in float32. Values and gradients are the same.
    """
    num_layers = 0
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == _NAME and isinstance(module, nn.Embedding):
            module.register_forward_hook(_with_heads_first_in_memory)
            num_layers += 1
    return num_layers


def _with_heads_first_in_memory(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """The biases [Tq, Tk, H] of an embedding, stored so that their transposition [H, Tq, Tk] is contiguous."""
    if not isinstance(output, Tensor) or output.dim() != 3:
        return output
    return output.permute(2, 0, 1).contiguous().permute(1, 2, 0)
