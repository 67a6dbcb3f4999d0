"""Read YAML of other programs as plain mappings, lists and text. Imports no torch.

The size and depth are limited, and references (``*name``) are errors: with merge keys (``<<``), a short text with them
can describe any amount of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

_MAX_DEPTH = 64
# The parser in C is optional in PyYAML, and twenty times as fast.
_EVENT_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def parse_yaml(text: str) -> Any:
    """Return the value in *text*, in which each scalar is text as written. Raises ValueError."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_EVENT_LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has a reference: *{event.anchor!s:.50}")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
        # BaseLoader: every scalar is text, and tags such as !!python/object are not constructed.
        return yaml.load(text, Loader=_TEXT_LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error).replace("\n", " ")[:300]) from error


def scalars_in(value: Any) -> Iterator[str]:
    """Yield each scalar of a parsed value, for example ``nemo:1_t.model``."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from scalars_in(item)
    elif isinstance(value, str):
        yield value
