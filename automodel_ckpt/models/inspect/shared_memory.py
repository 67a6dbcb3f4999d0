"""Parameters that are separate and share memory: ``head.weight.data = embedding.weight.data``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from automodel_ckpt.errors import RecipeError

_PLAIN = (torch.Tensor, nn.Parameter)


def check_separate_memory(model: nn.Module) -> None:
    """Raise :class:`RecipeError` if a trainable parameter of *model* shares memory with another parameter.

    Two names of one parameter are no error. Separate parameters have separate gradients and optimizer state, and stop
    sharing memory where the model is copied to a device or sharded: the same recipe would train another model there.
    """
    for (one, first), (other, second) in _overlapping(model.named_parameters()):
        if not (first.requires_grad or second.requires_grad):
            continue
        raise RecipeError(
            "two parameters of the model share memory, but they are not one parameter",
            where="model",
            value=f"{one}, {other}",
            hint="to tie them, assign the parameter itself (head.weight = embedding.weight), not its .data; to "
            "separate them, copy the values (.data.clone())",
        )


def _overlapping(
    parameters: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """Yield pairs of *parameters* that have elements in the same memory; at least one for each that has any."""
    by_storage: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, parameter in parameters:
        # Tensors of other types may have no memory, or another one than they state.
        if type(parameter) not in _PLAIN or parameter.layout is not torch.strided:
            continue
        if parameter.is_meta or not parameter.numel():
            continue
        start = parameter.data_ptr()
        extents = zip(parameter.shape, parameter.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in extents)
        end = start + (last + 1) * parameter.itemsize
        storage = parameter.untyped_storage().data_ptr()
        by_storage.setdefault(storage, []).append((start, end, name, parameter))
    for entries in by_storage.values():
        entries.sort(key=lambda entry: entry[:2])
        for index, (_, end, name, parameter) in enumerate(entries):
            for start, _, other_name, other in entries[index + 1 :]:
                if start >= end:
                    break
                if _have_common_elements(parameter, other):
                    yield (name, parameter), (other_name, other)


def _have_common_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose ranges of memory overlap have a common element: columns of a matrix have none."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    used = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    for tensor in (one, other):
        part = used.as_strided(
            tensor.shape,
            [stride * tensor.itemsize for stride in tensor.stride()],
            tensor.storage_offset() * tensor.itemsize,
        )
        if bool(part.any()):
            return True
        part.fill_(True)
    return False
