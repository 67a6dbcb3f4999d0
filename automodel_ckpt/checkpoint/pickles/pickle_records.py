"""A pickle read as a description: its objects become plain records, and nothing that it names is imported or called.

It reads pickles of a known form: the ``.metadata`` of PyTorch DCP, and the program of a tensor in an archive of
``torch.save``. A table lists what a program may name. The opcodes are those that Python's pickler writes for such
objects. Keys are text, integers or records, so that no hash takes stack. The result takes memory in proportion to the
program. Imports no torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from automodel_ckpt.checkpoint.pickles.restricted_unpickler import (
    RestrictedUnpickler,
    set_item,
    set_items,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault

Names = Mapping[str, Any]
"""The full names that a program may use. The value is :data:`RECORD` for a class whose objects become records, a
function that is called with the program's arguments, or any other value, which replaces the name."""
RECORD = object()


class Record:
    """An object of the pickle: the full name of its class, and the state that the pickle assigns to it."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def get(self, name: str) -> Any:
        """Return the attribute *name*, or None if the state is not a mapping or lacks it."""
        if type(self.state) is not dict:
            return None
        return self.state.get(name)


class _Kind:
    def __init__(self, name: str) -> None:
        self.name = name


class _Function:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def read_records(program: bytes, names: Names) -> Any:
    """Return the value of the pickle *program*, which may use the *names*.

    Raises :class:`Fault`, or what a damaged pickle makes Python's reader raise (any Exception).
    """
    return _Reader(program, names).load()


class _Reader(RestrictedUnpickler):
    # Protocol 4, with which PyTorch DCP writes .metadata, and the creation of records. With POP, our own .metadata
    # removes from the stack what it has stored in the memo (dcp_metadata.py).
    extra_opcodes = (
        "POP",
        "FRAME",
        "SHORT_BINUNICODE",
        "MEMOIZE",
        "STACK_GLOBAL",
    )

    def __init__(self, program: bytes, names: Names) -> None:
        super().__init__(program)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._names:
            raise Fault(f"it asks for {full[:200]!r}")
        meaning = self._names[full]
        if meaning is RECORD:
            return _Kind(full)
        if callable(meaning):
            return _Function(meaning)
        return meaning

    def persistent_load(self, saved_id: Any) -> Any:
        return saved_id

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if type(function) is not _Function:
            self.reject()
        return function.function(*arguments)

    def build(self, target: Any, state: Any) -> None:
        if type(target) is not Record or target.state is not None:
            self.reject()
        target.state = state

    def fill(self, target: Any, items: list[Any]) -> None:
        keys = items[::2]
        if type(target) is not dict:
            self.reject()
        # The hash of a nested tuple would take stack for each of its levels.
        if not all(type(key) in (str, int, Record) for key in keys):
            self.reject()
        target.update(zip(keys, items[1::2], strict=True))


def _new(reader: _Reader) -> None:
    arguments = reader.stack.pop()
    kind = reader.stack[-1]
    if type(kind) is not _Kind or arguments != ():
        reader.reject()
    # Python's NEWOBJ calls __new__ of the class; here nothing is called.
    reader.stack[-1] = Record(kind.name)


_Reader.dispatch[pickle.NEWOBJ[0]] = _new
_Reader.dispatch[pickle.SETITEM[0]] = set_item
_Reader.dispatch[pickle.SETITEMS[0]] = set_items
