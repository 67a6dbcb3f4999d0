"""Layers that a model converts to another type in its forward pass, such as the routers of Switch Transformers."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

_CONVERSION = re.compile(
    r"^\s*self\.(?P<layer>\w+) = self\.(?P=layer)\.to\("
    r"(?:dtype=)?(?:self\.(?P<attribute>\w+)|torch\.(?P<dtype>\w+))\)",
    re.MULTILINE,
)


def convert_layers(model: nn.Module) -> None:
    """Give the parameters of such layers now the types that the first forward pass of *model* would give them.

    A conversion in a forward pass replaces the memory of a parameter. fsdp2 would gather later values into the former
    memory, and the layer would compute with those of the first step in all steps.
    """
    for layer, dtype in _converted(model):
        for parameter in layer.parameters():
            if _is_converted(parameter):
                # The parameter stays the same object, so that ties are kept.
                parameter.data = parameter.data.to(dtype)


def converted_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters of such layers: no other type may be gathered for them than that of the layer."""
    of_layers: set[int] = set()
    for layer, _dtype in _converted(model):
        of_layers.update(id(parameter) for parameter in layer.parameters())
    found: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in of_layers and _is_converted(parameter):
            found.add(name)
    return frozenset(found)


def _is_converted(parameter: nn.Parameter) -> bool:
    # Not quantized values, which layers with scales have.
    return parameter.is_floating_point() and parameter.itemsize > 1


def _converted(model: nn.Module) -> Iterator[tuple[nn.Module, torch.dtype]]:
    """The layers in *model* that the forward pass of the module around them converts, and to which types."""
    for module in model.modules():
        kind: Any = type(module)
        for layer_name, attribute, dtype_name in _conversions_in(kind):
            layer: Any = getattr(module, layer_name, None)
            owner: Any = module if attribute else torch
            dtype: Any = getattr(owner, attribute or dtype_name, None)
            if isinstance(layer, nn.Module) and isinstance(dtype, torch.dtype):
                yield layer, dtype


@cache
def _conversions_in(kind: type[nn.Module]) -> tuple[tuple[str, str, str], ...]:
    """(layer, attribute with the type or "", name of the type in torch or "") by the source of the class's methods."""
    found: list[tuple[str, str, str]] = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(base).items():
            if name == "__init__" or not inspect.isfunction(value):
                continue
            method: Any = inspect.unwrap(value)
            if not _may_convert(method.__code__):
                continue
            try:
                source = inspect.getsource(method)
            except (OSError, TypeError, SyntaxError):
                continue
            for match in _CONVERSION.finditer(source):
                found.append((match["layer"], match["attribute"] or "", match["dtype"] or ""))
    return tuple(found)


def _may_convert(code: CodeType) -> bool:
    """Whether a method calls ``to`` and sets an attribute. Reading the source of every method would take time."""
    if "to" not in code.co_names:
        return False
    return any(each.opname == "STORE_ATTR" for each in dis.get_instructions(code))
