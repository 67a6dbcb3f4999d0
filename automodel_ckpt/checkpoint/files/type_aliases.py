"""The types that signatures repeat. Imports nothing of the package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

AnyPath = str | os.PathLike[str]
"""A path that a user or a caller gives."""

Shape = tuple[int, ...]
"""Numbers by dimension, the outermost first: the extents of a tensor or of a box, or a position in it."""
MAX_DIMENSIONS = 64
"""The most dimensions of a shape in a file."""

Values = Mapping[str, Any]
"""Values by name, such as the content of config.json, the options of an optimizer, or a state dict."""
ValueDict = dict[str, Any]

Files = Mapping[str, bytes]
"""The content of small files by name."""
FileDict = dict[str, bytes]

Texts = Mapping[str, str]
"""Texts by name, such as the new names of tensors or the metadata of a file."""
TextDict = dict[str, str]

Counts = Mapping[str, int]
"""Whole numbers by name, such as the bytes of files or the ids of tokens."""

Metrics = Mapping[str, float]
"""Measured values by name, such as losses."""

Strings = tuple[str, ...]
"""Names, or lines for the user, in their order."""
