"""The types that signatures of this package repeat. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automodel_ckpt.checkpoint.parts.slices import Tensor

Shape = tuple[int, ...]
"""The extents of a tensor, the outermost dimension first."""

Values = Mapping[str, Any]
"""Plain values by name, such as the content of config.json or the options of an optimizer."""
ValueDict = dict[str, Any]

TensorMap = Mapping[str, Tensor]
"""Described tensors by name."""
TensorDict = dict[str, Tensor]

Files = Mapping[str, bytes]
"""The content of small files by name."""
FileDict = dict[str, bytes]
