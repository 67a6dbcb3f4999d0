"""Plain values in the files of other programs: the numbers and texts of a state dict, without tensors and objects.

A learning-rate scheduler's state or the options of a parameter group can contain functions and objects of any class.
They are never made: only what is a number, a text, or a container of these is used. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.torch.torch_objects import Opaque

_PLAIN = (bool, int, float, str, type(None))
_COUNTER = "collections.Counter"
_MAX_DEPTH = 16
# Containers can be shared and contain each other, so that a small file can stand for any number of values.
_MAX_VALUES = 1 << 17
_ABSENT = object()


def plain_values(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the plain values of *state*, as new containers. Keys are text or numbers.

    An entry of a mapping that is neither plain nor a container is left out. In a list or tuple it becomes None, so that
    the others keep their positions. A ``collections.Counter`` becomes a dict. Raises :class:`Fault` if the values are
    nested too deeply, or are too many.
    """
    found = _Copy().value(state, 0)
    assert isinstance(found, dict)
    return found


class _Copy:
    """A copy of plain values. Counts them, to limit their number."""

    def __init__(self) -> None:
        self._num_values = 0

    def value(self, value: Any, depth: int) -> Any:
        """Return a copy of *value*; ``_ABSENT`` for an object that is not plain."""
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise Fault(f"a state has more than {_MAX_VALUES} plain values")
        if depth > _MAX_DEPTH:
            raise Fault(f"a state is nested more than {_MAX_DEPTH} levels deep")
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Opaque) and value.kind == _COUNTER and value.arguments:
            value = value.arguments[0]
        if isinstance(value, dict):
            copied = {
                key: self.value(item, depth + 1)
                for key, item in value.items()
                if type(key) in (str, int, float, bool)
            }
            return {key: item for key, item in copied.items() if item is not _ABSENT}
        if isinstance(value, (list, tuple)):
            items = [self.value(item, depth + 1) for item in value]
            items = [None if item is _ABSENT else item for item in items]
            return tuple(items) if isinstance(value, tuple) else items
        return _ABSENT
