"""A restricted unpickler: the core of all readers of pickles. Imports no torch.

A pickle is a program for a stack machine, which can import any module and call any function. This machine has only the
instructions that its caller lists, and it asks its caller what each name, call and state means. Nothing is imported.

``pickle_reader.py`` builds the values that ``torch.save`` wrote (tensors, containers, NumPy arrays),
``convert/formats/torch/torch_objects.py`` a description of objects of other programs, and ``state/display.py`` plain
values.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault

# pickle.Unpickler is written in C, and its instructions cannot be removed. _Unpickler, private in every version of
# Python up to 3.14, is its equivalent in Python, with a table of instructions: `dispatch`.
_PythonUnpickler: Any = getattr(pickle, "_Unpickler")  # noqa: B009

# The instructions that build numbers, text and containers and refer to earlier values. They create at most as many
# objects as the program has bytes.
_DATA_OPCODES = (
    "PROTO",
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
    "BINGET",
    "LONG_BINGET",
    "GLOBAL",
    "BINPERSID",
)


class RestrictedUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Runs a pickle program with a limited set of instructions.

    A subclass lists further opcodes in *extra_opcodes* and implements the ones of :meth:`find_class`,
    :meth:`persistent_load`, :meth:`call`, :meth:`build` and :meth:`fill` that it needs; the others reject. Each raises
    :class:`Fault` for what it does not allow. :meth:`load` also raises whatever a damaged program makes Python's reader
    raise (any Exception).
    """

    extra_opcodes: ClassVar[tuple[str, ...]] = ()
    rejection: ClassVar[str] = "its pickle has an instruction that such a pickle never contains"

    def __init_subclass__(cls) -> None:
        cls.dispatch = instruction_table([*_DATA_OPCODES, *cls.extra_opcodes])

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(program), encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of the global *module*.*name* in this program."""
        self.reject()

    def persistent_load(self, saved_id: Any) -> Any:
        """Return what the persistent id *saved_id* refers to: the storage of a tensor."""
        self.reject()

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result of the call ``function(*arguments)`` in the program (REDUCE)."""
        self.reject()

    def build(self, target: Any, state: Any) -> None:
        """Apply the *state* that the program gives to the object *target* (BUILD)."""
        self.reject()

    def fill(self, target: Any, items: list[Any]) -> None:
        """Add *items*, alternating keys and values, to *target* (SETITEM and SETITEMS)."""
        self.reject()

    def reject(self) -> NoReturn:
        """Raise :class:`Fault` for an instruction that the program must not contain."""
        raise Fault(self.rejection)


def instruction_table(opcodes: Iterable[str]) -> dict[int, Any]:
    """Return the table of instructions by the opcode's byte.

    All are rejected, except *opcodes* and those that ask the reader: REDUCE, BUILD, SETITEM and SETITEMS.
    """
    table: dict[int, Any] = dict.fromkeys(range(256), RestrictedUnpickler.reject)
    for name in opcodes:
        code = getattr(pickle, name)[0]
        table[code] = _PythonUnpickler.dispatch[code]
    # Python's own versions call anything on the stack, and __setstate__ of any object.
    table[pickle.REDUCE[0]] = _reduce
    table[pickle.BUILD[0]] = _build
    table[pickle.SETITEM[0]] = _set_item
    table[pickle.SETITEMS[0]] = _set_items
    return table


def _set_item(reader: RestrictedUnpickler) -> None:
    value = reader.stack.pop()
    key = reader.stack.pop()
    reader.fill(reader.stack[-1], [key, value])


def _set_items(reader: RestrictedUnpickler) -> None:
    items = reader.pop_mark()
    reader.fill(reader.stack[-1], items)


def _reduce(reader: RestrictedUnpickler) -> None:
    arguments = reader.stack.pop()
    function = reader.stack[-1]
    if type(arguments) is not tuple:
        reader.reject()
    reader.stack[-1] = reader.call(function, arguments)


def _build(reader: RestrictedUnpickler) -> None:
    state = reader.stack.pop()
    reader.build(reader.stack[-1], state)
