"""Subclasses of modules that compute the same with fewer kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Compute = Callable[[Any, Tensor], Tensor | None]
"""Called with a module and its input. None when the module has to compute as before."""


def fused_class(module_class: type[nn.Module], compute: Compute) -> type[nn.Module]:
    """A subclass of *module_class* with the same name, by which transformers initializes modules.

    It calls *compute* if it gets one positional argument.
    """

    @functools.wraps(module_class.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            found = compute(module, args[0])
            if found is not None:
                return found
        return module_class.forward(module, *args, **kwargs)

    names = {
        "forward": forward,
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "__doc__": module_class.__doc__,
    }
    return type(module_class.__name__, (module_class,), names)


def agrees(found: object, expected: Tensor, **tolerances: Any) -> bool:
    """Whether a module that was tried has returned *expected*, within *tolerances* of ``torch.allclose``."""
    if not isinstance(found, Tensor) or found.dtype != expected.dtype:
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, **tolerances)
