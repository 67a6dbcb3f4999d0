"""Subclasses of modules that compute the same with fewer kernels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Compute = Callable[[Any, torch.Tensor], torch.Tensor | None]
"""Called with a module and its input. None when the module has to compute as before."""


def fused_class(module_class: type[nn.Module], compute: Compute) -> type[nn.Module]:
    """A subclass of *module_class* with the same name, by which transformers initializes modules.

    It calls *compute* if it gets one positional argument. A module in a pickle has the class *module_class*, and needs
    nothing of this package when it is read; a deep copy has the subclass.
    """

    @functools.wraps(module_class.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            found = compute(module, args[0])
            if found is not None:
                return found
        return module_class.forward(module, *args, **kwargs)

    def reduced(module: Any, protocol: Any) -> tuple[Any, ...]:
        return object.__new__, (module_class,), vars(module)

    def deep_copied(module: Any, memo: dict[int, Any]) -> Any:
        copied: Any = module_class.__new__(module_class)
        # Parts of the module may refer to it.
        memo[id(module)] = copied
        copied.__setstate__(copy.deepcopy(vars(module), memo))
        copied.__class__ = type(module)
        return copied

    names = {
        "forward": forward,
        "__reduce_ex__": reduced,
        "__deepcopy__": deep_copied,
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "__doc__": module_class.__doc__,
    }
    return type(module_class.__name__, (module_class,), names)
