"""What transformers' functions for attention masks take and return, in all supported versions.

Read in the sources of transformers 5.17 to 5.24, ``masking_utils.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any


def create_without_cache(create: Callable[..., Any], **arguments: Any) -> Any:
    """Call *create*, which makes the masks of a model, for a forward pass without a cache of keys and values.

    The argument for the cache is ``cache`` since transformers 5.24, which warns of ``past_key_values``.
    """
    names = inspect.signature(create).parameters
    return create(**{"cache" if "cache" in names else "past_key_values": None}, **arguments)


def with_values(function: Any, replaced: Callable[[Any], Any]) -> Any:
    """A copy of a mask function with ``replaced(value)`` in place of each value in its closure and its default
    arguments, and in those of the functions that it joins."""
    if isinstance(function, tuple):
        return tuple(with_values(each, replaced) for each in function)
    if not isinstance(function, FunctionType):
        return replaced(function)
    cells = []
    for cell in function.__closure__ or ():
        content = with_values(cell.cell_contents, replaced)
        cells.append(CellType(content))
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        with_values(function.__defaults__ or (), replaced),
        tuple(cells) or None,
    )
    by_name = function.__kwdefaults__ or {}
    copied.__kwdefaults__ = {name: with_values(by_name[name], replaced) for name in by_name}
    return copied
