"""A pickle read as a description: its objects become plain records, and nothing that it names is imported or called.

For pickles whose form is known and of which only the content is wanted: the ``.metadata`` of PyTorch DCP, and the
program of a tensor in an archive of ``torch.save``. A table lists what a program may name; the opcodes are those
that Python's pickler writes for such objects; keys are text or records, so that no hash takes stack. What is read takes
memory in proportion to the program. Imports no torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from automodel_ckpt.checkpoint.files.torch_archive_reading import Fault

# "record": its state is kept as it is; a function: called with the arguments; anything else stands for the name.
Names = Mapping[str, Any]
RECORD = object()

_OPCODES = (
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_DICT",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    "BINGET",
    "LONG_BINGET",
    "GLOBAL",
    "STACK_GLOBAL",
    "BINPERSID",
)
# The one that is written in Python: its opcodes can be taken away.
_Unpickler: Any = getattr(pickle, "_Unpickler")  # noqa: B009


class Record:
    """An object of the pickle: its class's full name, and the state that it would have been given."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def get(self, name: str) -> Any:
        """An attribute; None where the state is no mapping or lacks it."""
        return self.state.get(name) if type(self.state) is dict else None


class _Kind:
    def __init__(self, name: str) -> None:
        self.name = name


class _Function:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def read_records(program: bytes, names: Names) -> Any:
    """The value of a pickle. Raises :class:`Fault`, or what a damaged pickle makes Python's reader raise (any
    Exception)."""
    return _Reader(program, names).load()


class _Reader(_Unpickler):  # type: ignore[misc]
    def __init__(self, program: bytes, names: Names) -> None:
        super().__init__(io.BytesIO(program), encoding="utf-8")
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._names:
            raise Fault(f"it asks for {full[:200]!r}")
        meant = self._names[full]
        if meant is RECORD:
            return _Kind(full)
        return _Function(meant) if callable(meant) else meant

    def persistent_load(self, saved_id: Any) -> Any:
        return saved_id


def _rejected(_: _Reader) -> NoReturn:
    raise Fault("its pickle has an instruction that such a pickle never contains")


def _new(reader: _Reader) -> None:
    arguments, kind = reader.stack.pop(), reader.stack[-1]
    if type(kind) is not _Kind or arguments != ():
        _rejected(reader)
    reader.stack[-1] = Record(kind.name)


def _reduce(reader: _Reader) -> None:
    arguments, function = reader.stack.pop(), reader.stack[-1]
    if type(function) is not _Function or type(arguments) is not tuple:
        _rejected(reader)
    reader.stack[-1] = function.function(*arguments)


def _build(reader: _Reader) -> None:
    state, target = reader.stack.pop(), reader.stack[-1]
    if type(target) is not Record or target.state is not None:
        _rejected(reader)
    target.state = state


def _set_items(reader: _Reader) -> None:
    items = reader.pop_mark()
    _fill(reader, reader.stack[-1], items)


def _set_item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _fill(reader, reader.stack[-1], [key, value])


def _fill(reader: _Reader, target: Any, items: list[Any]) -> None:
    if type(target) is not dict or not all(type(key) in (str, int, Record) for key in items[::2]):
        _rejected(reader)
    target.update(zip(items[::2], items[1::2], strict=True))


_Reader.dispatch = dict.fromkeys(range(256), _rejected) | {
    getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
}
_Reader.dispatch |= {
    pickle.NEWOBJ[0]: _new,
    pickle.REDUCE[0]: _reduce,
    pickle.BUILD[0]: _build,
    pickle.SETITEM[0]: _set_item,
    pickle.SETITEMS[0]: _set_items,
}
