"""Values of untrusted files: checked numbers, and the error for a model that is not converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.errors import unusable

KeyValue = tuple[str, str, Any]
"""Key, the GGUF type's name as in ``GGUFWriter.add_<type>``, value."""


def positive_integer(values: Values, key: str, default: float | None = None) -> int:
    """Return ``values[key]``, or *default* if it is missing or null; validate that it is an integer from 1 to 2**31.

    Raises :class:`NotConvertible`, which names the key.
    """
    value = values.get(key)
    value = default if value is None else value
    # type(), because True is an int for isinstance().
    if type(value) is not int or not 0 < value < 2**31:
        raise NotConvertible("there is no usable value", f"{key}: {value!r:.100}")
    return int(value)


def positive_number(values: Values, key: str, default: float | None = None) -> float:
    """Return ``values[key]``, or *default* if it is missing or null; validate that it is a number above 0.

    Raises :class:`NotConvertible`, which names the key.
    """
    stated = values.get(key)
    value: Any = default if stated is None else stated
    # Not isinstance: True is an int, too. The comparison is false for NaN.
    is_number = type(value) in (int, float)
    if not is_number or not 0 < value < 1e30:
        raise NotConvertible("there is no usable value", f"{key}: {value!r:.100}")
    return float(value)


class NotConvertible(Exception):
    """A model that cannot be converted to or from GGUF: *what* is not possible, and the *value* that shows it."""

    def __init__(self, what: str, value: object) -> None:
        super().__init__(what, value)
        self.what, self.value = what, value


@contextmanager
def reported(where: str) -> Iterator[None]:
    """Raise :class:`NotConvertible` in the block as :class:`CheckpointUnusable`, with the file and an alternative."""
    try:
        yield
    except NotConvertible as error:
        raise unusable(
            error.what,
            where,
            error.value,
            "export Hugging Face files (--to hf) and convert them with llama.cpp's own convert_hf_to_gguf.py",
        ) from error
