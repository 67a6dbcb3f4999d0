"""Values of untrusted files: checked numbers, and the error for a model that is not converted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
    return int(_positive(values, key, default, (int,), 2**31))


def positive_number(values: Values, key: str, default: float | None = None) -> float:
    """Return ``values[key]``, or *default* if it is missing or null; validate that it is a number above 0.

    Raises :class:`NotConvertible`, which names the key.
    """
    return float(_positive(values, key, default, (int, float), 1e30))


def _positive(
    values: Values, key: str, default: float | None, types: Collection[type], limit: float
) -> Any:
    stated = values.get(key)
    value: Any = default if stated is None else stated
    # Not isinstance: True is an int, too. The comparison is false for NaN.
    if type(value) not in types or not 0 < value < limit:
        raise NotConvertible("there is no usable value", f"{key}: {value!r:.100}")
    return value


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
