"""Reading a processor, with what is missing for videos left out."""

from __future__ import annotations

from typing import Any

from transformers import AutoProcessor

_AUTO: Any = AutoProcessor  # its class methods have no annotations


def read_processor(name: str) -> Any:
    """The processor of a directory or Hub name. Raises OSError, ValueError or ImportError where there is none."""
    return _AUTO.from_pretrained(name)
