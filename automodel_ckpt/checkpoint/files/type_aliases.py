"""The types that signatures repeat. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]
"""Numbers by dimension, the outermost first: the extents of a tensor or of a box, or a position in it."""

Values = Mapping[str, Any]
"""Values by name, such as the content of config.json, the options of an optimizer, or a state dict."""
ValueDict = dict[str, Any]

Files = Mapping[str, bytes]
"""The content of small files by name."""
FileDict = dict[str, bytes]

Texts = Mapping[str, str]
"""Texts by name, such as the new names of tensors or the metadata of a file."""
TextDict = dict[str, str]
