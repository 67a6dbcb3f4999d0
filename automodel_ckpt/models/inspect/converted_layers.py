"""Layers that a model converts to another type in its forward pass, such as the routers of Switch Transformers."""

from __future__ import annotations

import dis
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

_CONVERSION = re.compile(
    r"^\s*self\.(?P<layer>\w+) = self\.(?P=layer)\.to\("
    r"(?:dtype=)?(?:self\.(?P<attribute>\w+)|torch\.(?P<dtype>\w+))\)",
    re.MULTILINE,
)


class _Conversion(NamedTuple):
    """A statement in a *method* of a class that converts the submodule *layer*: to the type in an *attribute* of the
    module, or else to the one that torch has as *dtype*."""

    method: str
    layer: str
    attribute: str
    dtype: str


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
    found: list[tuple[nn.Module, _Conversion]] = []
    kinds: dict[type[nn.Module], None] = {}
    for module in model.modules():
        kinds[type(module)] = None
        kind: Any = type(module)
        found += [(module, conversion) for conversion in _conversions_in(kind)]
    if not found:
        return
    called = _called_in_forward(kinds)
    for module, (method, layer_name, attribute, dtype_name) in found:
        if method not in called:
            # Such as one that prepares the model for inference.
            continue
        layer: Any = getattr(module, layer_name, None)
        owner: Any = module if attribute else torch
        dtype: Any = getattr(owner, attribute or dtype_name, None)
        if isinstance(layer, nn.Module) and isinstance(dtype, torch.dtype):
            yield layer, dtype


def _called_in_forward(kinds: Iterable[type[nn.Module]]) -> set[str]:
    """The names of the methods of these classes that forward passes may call, directly or through each other.

    Methods that every module has, such as ``to``, are called on tensors, too, and are not among them.
    """
    used: defaultdict[str, set[str]] = defaultdict(set)
    for kind in kinds:
        for name, method in _methods(kind):
            used[name] |= _names_in(method.__code__)
    called: set[str] = set()
    found = {"forward"}
    while found:
        called |= found
        names = set().union(*(used[name] for name in found))
        found = {name for name in names if name in used and not hasattr(nn.Module, name)} - called
    return called


@cache
def _conversions_in(kind: type[nn.Module]) -> tuple[_Conversion, ...]:
    """The conversions in the source of the class's methods."""
    found: list[_Conversion] = []
    for name, method in _methods(kind):
        if not _may_convert(method.__code__):
            continue
        try:
            source = inspect.getsource(method)
        except (OSError, TypeError, SyntaxError):
            continue
        for match in _CONVERSION.finditer(source):
            attribute, dtype = match["attribute"] or "", match["dtype"] or ""
            found.append(_Conversion(name, match["layer"], attribute, dtype))
    return tuple(found)


def _methods(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """(name, function without decorators) of the methods of a class, except those of torch."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(base).items():
            if name != "__init__" and inspect.isfunction(value):
                method: Any = inspect.unwrap(value)
                if inspect.isfunction(method):
                    yield name, method


def _names_in(code: CodeType) -> set[str]:
    """The names of attributes and globals in a function, and in the functions inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _may_convert(code: CodeType) -> bool:
    """Whether a method calls ``to`` and sets an attribute. Reading the source of every method would take time."""
    if "to" not in code.co_names:
        return False
    return any(each.opname == "STORE_ATTR" for each in dis.get_instructions(code))
