"""The objects in a file of ``torch.save`` as a description: nothing is imported, called or copied. Imports no torch.

Such a file is a zip archive. Its record ``data.pkl`` is a pickle of the saved object, and each record ``data/KEY`` has
the raw bytes of one storage, uncompressed (source: torch.serialization, torch 2.13). :func:`describe_archive` returns
the object with dicts, lists, tuples, numbers and text as they are. A tensor becomes a :class:`StoredView`, and an
object of any other class an :class:`Opaque`, whatever the class is.
"""

from __future__ import annotations

import itertools
import mmap
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from automodel_ckpt.checkpoint.files.dtypes import CODES, DTYPE_BITS
from automodel_ckpt.checkpoint.files.type_aliases import Shape, ValueDict
from automodel_ckpt.checkpoint.parts.slices import counts
from automodel_ckpt.checkpoint.pickles.restricted_unpickler import RestrictedUnpickler
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault, archive_ranges

_KEYS = (bool, int, float, str)
_PLAIN = (*_KEYS, type(None))
_COUNTER = "collections.Counter"
_MAX_STATE_DEPTH = 16
# A learning-rate schedule's state or the options of a parameter group can contain functions and objects of any class.
# They are never made: only what is a number, a text, or a container of these is used.
# Containers can be shared and contain each other, so that a small file can describe any number of values.
_MAX_VALUES = 1 << 17
_ABSENT = object()


def plain_values(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the plain values of *state*, as new containers. Keys are text or numbers.

    An entry of a mapping that is neither plain nor a container is left out. In a list or tuple it becomes None, so that
    the others keep their positions. A ``collections.Counter`` becomes a dict. Raises :class:`Fault` if the values are
    nested too deeply, or are too many.
    """
    numbers = itertools.count(1)

    def copied(value: Any, depth: int) -> Any:
        if next(numbers) > _MAX_VALUES or depth > _MAX_STATE_DEPTH:
            limits = f"{_MAX_VALUES} plain values, or {_MAX_STATE_DEPTH} levels"
            raise Fault(f"a state has more than {limits}")
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Opaque) and value.kind == _COUNTER and value.arguments:
            value = value.arguments[0]
        if isinstance(value, dict):
            items = value.items()
            found = {key: copied(item, depth + 1) for key, item in items if type(key) in _KEYS}
            return {key: item for key, item in found.items() if item is not _ABSENT}
        if isinstance(value, (list, tuple)):
            entries = (copied(item, depth + 1) for item in value)
            return type(value)(None if item is _ABSENT else item for item in entries)
        return _ABSENT

    plain: dict[Any, Any] = copied(state, 0)
    return plain


STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
}
"""The dtype codes of torch's typed storages, by class name."""
# Functions that make a tensor of something else than a storage (torch 2.13).
_MAKERS_WITHOUT_STORAGE = (
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_device_tensor_from_numpy",
)
_MAX_DIMENSIONS = 64
# A tuple is hashed as a key, which takes stack for each level of nesting. These types take none.
_KEY_TYPES = (str, int, float, bool, bytes, type(None))
# An unpickled object takes up to eighty times the bytes of its program. The program of a model with 200,000 tensors
# has about 60 MB; a larger one must have data on the disk to describe.
_FREE_PROGRAM_BYTES = 4 << 20
_MAX_PROGRAM_BYTES = 1 << 29
_DATA_RATIO = 128


@dataclass(frozen=True)
class StoredView:
    """A tensor: the elements of the storage *key* that *offset*, *shape* and *strides* (in elements) select.

    *storage_bytes* is the size of the storage, as the pickle states it.
    """

    dtype: str
    key: str
    storage_bytes: int
    offset: int
    shape: Shape
    strides: Shape

    @property
    def num_outer_dimensions(self) -> int:
        """The number of leading dimensions with elements apart in the storage. The other dimensions are contiguous."""
        expected = 1
        for dimension in range(len(self.shape) - 1, -1, -1):
            extent, stride = self.shape[dimension], self.strides[dimension]
            # The stride of a dimension of one element has no meaning.
            if extent > 1 and stride != expected:
                return dimension + 1
            expected *= max(extent, 1)
        return 0


class Opaque:
    """An object of a class that this program does not know: the class, and what the pickle makes it of."""

    __slots__ = ("arguments", "items", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []

    def append(self, value: Any) -> None:
        """Add an item: the unpickler calls it for a subclass of list."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """Add items: the unpickler calls it for a subclass of list."""
        self.items.extend(values)

    def get(self, name: str) -> Any:
        """Return the attribute *name*, or None when the state is not a mapping or lacks it."""
        return self.state.get(name) if type(self.state) is dict else None

    def contents(self) -> tuple[Any, ...]:
        """Return everything that the pickle makes the object of."""
        return (*self.arguments, self.state, *self.items)


@dataclass(frozen=True)
class Archive:
    """The object in a file, and the byte range (begin, end) of each storage in the file, by key."""

    value: Any
    storages: Mapping[str, tuple[int, int]]


def describe_archive(data: bytes | memoryview, *, max_program_bytes: int | None = None) -> Archive:
    """Describe the object in *data*, the content of a file of ``torch.save``.

    The pickle has at most *max_program_bytes*. By default the limit grows with *data*.
    Raises :class:`Fault`, or whatever a damaged pickle makes Python's reader raise (any Exception).
    """
    ranges = archive_ranges(data)
    if _record(data, ranges, "byteorder", 16) not in (b"", b"little"):
        raise Fault("it was written on a machine of the other byte order")
    limit = max_program_bytes or min(
        _MAX_PROGRAM_BYTES, max(_FREE_PROGRAM_BYTES, len(data) // _DATA_RATIO)
    )
    program = _record(data, ranges, "data.pkl", limit)
    storages = {
        name.removeprefix("data/"): place
        for name, place in ranges.items()
        if name.startswith("data/")
    }
    return Archive(_Reader(program).load(), storages)


def describe_file(
    descriptor: int,
    start: int = 0,
    nbytes: int | None = None,
    *,
    max_program_bytes: int | None = None,
) -> Archive:
    """Describe the object in *nbytes* at *start* of a file of ``torch.save``, by default in the whole file.

    The storages are byte ranges of the file. Only the pages that are accessed are read. Raises as
    :func:`describe_archive`.
    """
    with (
        mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content,
        # The views must be released before the map can be closed.
        memoryview(content) as everything,
    ):
        stop = len(everything) if nbytes is None else start + nbytes
        # A slice of a memoryview beyond its end is shorter, without an error.
        if stop > len(everything):
            raise Fault(f"the file has {len(everything)} bytes, the item ends at {stop}")
        with everything[start:stop] as data:
            archive = describe_archive(data, max_program_bytes=max_program_bytes)
    storages = {key: (begin + start, end + start) for key, (begin, end) in archive.storages.items()}
    return Archive(archive.value, storages)


def describe_pickle(program: bytes) -> Any:
    """Describe the object in the pickle *program*, which has no storages. Raises as :func:`describe_archive`."""
    return _Reader(program).load()


def views_in(value: Any) -> Iterator[StoredView]:
    """Iterate over the tensors anywhere in *value*, each container once."""
    return (item for item in _items_in(value) if isinstance(item, StoredView))


def has_tensor(value: Any) -> bool:
    """Whether there is a tensor in *value*, also one without a storage: on the device meta, or of another device."""
    return any(
        isinstance(item, StoredView) or item.kind in _MAKERS_WITHOUT_STORAGE
        for item in _items_in(value)
    )


def _items_in(value: Any) -> Iterator[StoredView | Opaque]:
    """Yield the tensors and the unknown objects anywhere in *value*, each container once."""
    seen = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, StoredView):
            yield item
            continue
        if not isinstance(item, (dict, list, tuple, Opaque)) or id(item) in seen:
            continue
        # Containers can contain themselves. All of them live as long as *value*, so that an id is unique.
        seen.add(id(item))
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, Opaque):
            yield item
            # The tuple is new: it would be freed, and its id used again, if it were pending itself.
            pending.extend(item.contents())
        else:
            pending.extend(item)


def _record(
    data: bytes | memoryview, ranges: Mapping[str, tuple[int, int]], name: str, limit: int
) -> bytes:
    begin, end = ranges.get(name, (0, 0))
    if end - begin > limit:
        raise Fault(f"its record {name} takes {end - begin} bytes, more than {limit}")
    return bytes(data[begin:end])


# ---------------------------------------------------------------- names in a pickle


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """A class or function that is not known."""

    name: str


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredView:
    # The rest is requires_grad, hooks and, of _rebuild_tensor_v3, the dtype (its storage is untyped). Then whether the
    # tensor is the conjugate or the negative of what is stored.
    if type(storage) is not _Storage:
        raise Fault("a tensor is not made of a storage")
    dtype = storage.dtype
    if len(rest) > 2 and isinstance(rest[2], str):
        dtype = rest[2]
    if any(isinstance(each, dict) and (each.get("conj") or each.get("neg")) for each in rest[2:]):
        raise Fault(
            "a tensor's values are stored conjugated or negated: save its resolve_conj().resolve_neg()"
        )
    extents, steps, starts = counts(shape), counts(strides), counts([offset])
    if extents is None or steps is None or starts is None or len(extents) != len(steps):
        raise Fault("the shape, the strides or the offset of a tensor are not counts")
    if len(extents) > _MAX_DIMENSIONS:
        raise Fault(f"a tensor has {len(extents)} dimensions")
    return StoredView(dtype, storage.key, storage.nbytes, starts[0], extents, steps)


_PLAIN_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def _typed(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    """A tensor with Python attributes, or of a subclass of torch.Tensor."""
    name = kind.name if type(kind) is _Class else "a subclass of torch.Tensor"
    if isinstance(function, FunctionType) and type(arguments) is tuple:
        # A tensor of the subclass has a storage.
        arguments = function(*arguments)
        if name in _PLAIN_CLASSES:
            return arguments
    return Opaque(name, (arguments,))


def _dict(items: Any = (), *_: Any) -> dict[Any, Any]:
    # OrderedDict([[key, value], ...]) is how protocol 2 stores some versions of it; defaultdict has a factory.
    result = {}
    for pair in items if type(items) is list else ():
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Fault("a mapping is made of something else than pairs")
        _check_key(pair[0])
        result[pair[0]] = pair[1]
    return result


def _first(data: Any = (), *_: Any) -> Any:
    return data


def _list(items: Any = ()) -> list[Any]:
    return list(items) if type(items) in (list, tuple) else []


def _text(value: Any, encoding: Any = "latin1") -> Any:
    # Protocol 2 has no bytes: it stores them as text.
    if type(value) is not str or encoding != "latin1":
        raise Fault("it encodes text in an unusual way")
    return value.encode("latin1")


def _reconstructed(kind: Any, *arguments: Any) -> Opaque:
    return Opaque(kind.name if type(kind) is _Class else "an object", arguments)


_KNOWN: ValueDict = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": _first,
    "torch.storage.UntypedStorage": "U8",
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _dict,
    "copyreg._reconstructor": _reconstructed,
    "copy_reg._reconstructor": _reconstructed,
    "_codecs.encode": _text,
    **{
        f"{module}.{name}": _list
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "list")
    },
    **{f"torch.{name}": code for name, code in (STORAGE_DTYPES | CODES).items()},
}


# ---------------------------------------------------------------- the pickle


class _Reader(RestrictedUnpickler):
    # torch.save writes protocol 2 by default; these are the data instructions of the protocols up to 5.
    # BYTEARRAY8 is missing: it allocates as many bytes as a number in the file states.
    extra_opcodes = (
        "FRAME",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BINBYTES8",
        "LONG4",
        "MEMOIZE",
        "STACK_GLOBAL",
        "POP",
        "POP_MARK",
    )
    rejection = "its pickle has an instruction that torch.save never writes"

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        # Nothing is imported: an unknown class is only its name.
        return _KNOWN.get(full) or _Class(full)

    def persistent_load(self, saved_id: Any) -> Any:
        if type(saved_id) is not tuple or len(saved_id) != 5 or saved_id[0] != "storage":
            raise Fault("it refers to something else than a storage")
        _, dtype, key, _, numel = saved_id
        is_known = type(dtype) is str and dtype in DTYPE_BITS
        if not is_known or type(key) is not str or counts([numel]) is None:
            name = dtype.name if type(dtype) is _Class else dtype
            raise Fault(f"it has a storage of an unknown kind: {name!r:.100}")
        return _Storage(dtype, key, numel * DTYPE_BITS[dtype] // 8)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        # A pickle cannot make a function: it is one of _KNOWN.
        if isinstance(function, FunctionType):
            return function(*arguments)
        if type(function) is _Class:
            return Opaque(function.name, arguments)
        return self.reject()

    def build(self, target: Any, state: Any) -> None:
        # An OrderedDict (a state dict has _metadata) and a parameter may have attributes, which are not used.
        if type(target) is Opaque:
            target.state = state
        elif type(target) not in (dict, StoredView):
            self.reject()

    def fill(self, target: Any, items: list[Any]) -> None:
        if type(target) is Opaque:
            target.items.extend(items)
            return
        if type(target) is not dict:
            self.reject()
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(key)
            target[key] = value


def _check_key(key: Any) -> None:
    items = key if type(key) is tuple else (key,)
    if type(key) is not Opaque and not all(type(item) in _KEY_TYPES for item in items):
        raise Fault("a key of a mapping is neither text nor a number")


def _new_object_with_keywords(reader: _Reader) -> None:
    keywords = reader.stack.pop()
    arguments = reader.stack.pop()
    kind = reader.stack[-1]
    if type(arguments) is not tuple or type(kind) is not _Class:
        reader.reject()
    reader.stack[-1] = Opaque(kind.name, (*arguments, keywords))


def _add_items(reader: _Reader) -> None:
    items = reader.pop_mark()
    target = reader.stack[-1]
    if type(target) is not list:
        reader.reject()
    target.extend(items)


_Reader.dispatch[pickle.NEWOBJ[0]] = _Reader.dispatch[pickle.REDUCE[0]]
_Reader.dispatch[pickle.NEWOBJ_EX[0]] = _new_object_with_keywords
# A set is only a list here: hashing an item could take any amount of stack.
_Reader.dispatch[pickle.EMPTY_SET[0]] = lambda reader: reader.append([])
_Reader.dispatch[pickle.ADDITEMS[0]] = _add_items
_Reader.dispatch[pickle.FROZENSET[0]] = lambda reader: reader.append(reader.pop_mark())
