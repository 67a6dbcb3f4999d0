"""Read plain data that ``torch.save`` wrote, and nothing else that a pickle or a zip archive can contain.

``torch.load(weights_only=True)`` runs no code either, but a small file can make it take any amount of memory (records
that are compressed or overlap, ``bytearray(10**11)``) or end the process (a tuple nested a million times, as a key).
Here an archive's records are stored as they are, side by side; a pickle has the opcodes that ``torch.save`` writes, may
call the functions listed below, and cannot build what is larger or deeper than its own bytes account for.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import _utils as rebuilders
from torch.storage import TypedStorage, UntypedStorage, _get_dtype_from_pickle_storage_type

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.pickles.restricted_unpickler import RestrictedUnpickler
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault, archive_records
from automodel_ckpt.checkpoint.state.storable import NUMPY_MARK
from automodel_ckpt.errors import unusable

# Saves allow 25 levels of containers (state/storable.py).
MAX_DEPTH = 200
MAX_TUPLES = 30
# Twice what state/storable.py lets through: it counts a mapping's keys and values as one.
_MAX_REPEATED = 2_200_000
# What a tensor may have more than its storage (a view with stride 0).
_FREE_BYTES = 64 << 20


def load(data: bytes, where: str) -> Any:
    """The value that ``torch.save`` wrote as *data*, on the CPU. Raises :class:`CheckpointUnusable` else."""
    try:
        records = archive_records(data)
        if bytes(records.get("byteorder", b"little")) != b"little":
            raise Fault("it was written on a machine of the other byte order")
        program = bytes(records.get("data.pkl", b""))
        value = _Reader(program, records).load()
        _check_finite(value, _MAX_REPEATED + 20 * len(program))
        return value
    except Exception as error:
        said = str(error).split("\n")[0] if isinstance(error, Fault) else repr(error)
        raise unusable("stored state is not plain data", where, said[:300]) from error


# ---------------------------------------------------------------- the pickle


class _Reader(RestrictedUnpickler):
    """Builds plain data from a pickle program, its tensors' storages from the archive's other records."""

    extra_opcodes = ("LONG4",)
    rejection = "its pickle has an instruction that torch.save never writes"

    def __init__(self, program: bytes, records: Mapping[str, memoryview]) -> None:
        super().__init__(program)
        self._records = records
        self._storages: dict[str, UntypedStorage] = {}
        # Depth by the tuple's identity. The tuple is kept as well: an identity is unique only while the object lives.
        self._depths: dict[int, tuple[int, object]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _FUNCTIONS:
            return _FUNCTIONS[full]
        # pickle's own find_class resolves dotted names in protocol 4, which lead to other modules.
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        # Storage classes only name a dtype in a persistent id; call() rejects them.
        if isinstance(found, type) and name.endswith("Storage"):
            return found
        raise Fault(f"it asks for {full!r}")

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if not _is_callable(function):
            self.reject()
        return function(*arguments)

    def build(self, target: Any, state: Any) -> None:
        # The state dict of a module is an OrderedDict with attributes. No other object has a state.
        if type(target) is not collections.OrderedDict or type(state) is not dict:
            self.reject()
        target.__dict__.update(state)

    def fill(self, target: Any, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def persistent_load(self, saved_id: Any) -> Any:
        kind, storage_type, key, _, numel = saved_id
        if kind != "storage":
            raise Fault(f"it refers to a {kind!r:.40}")
        name = getattr(storage_type, "__name__", "")
        dtype = (
            torch.uint8 if name == "UntypedStorage" else _get_dtype_from_pickle_storage_type(name)
        )
        if key not in self._storages:
            self._storages[key] = _storage(self._records[f"data/{key}"])
        if numel * dtype.itemsize != self._storages[key].nbytes():
            raise Fault(
                f"a tensor's storage of {numel} elements has {self._storages[key].nbytes()} bytes"
            )
        return TypedStorage(wrap_storage=self._storages[key], dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    def note_tuple(self) -> None:
        """Check the depth of the tuple that was just built.

        A tuple that is a key is hashed, which takes stack for each level: a deep one would end the process.
        """
        made = self.stack[-1]
        depth = 1
        for item in made:
            if isinstance(item, tuple):
                inner_depth, _ = self._depths.get(id(item), (1, None))
                depth = max(depth, 1 + inner_depth)
        if depth > MAX_TUPLES:
            raise Fault(f"its tuples are nested more than {MAX_TUPLES} levels deep")
        self._depths[id(made)] = (depth, made)


def _storage(record: memoryview) -> UntypedStorage:
    if not record:
        return UntypedStorage(0)  # type: ignore[no-untyped-call]
    # A copy: the file's bytes are read-only, and torch does not define writes to such a tensor.
    return torch.frombuffer(bytearray(record), dtype=torch.uint8).untyped_storage()


def _checked_tuple(build: Callable[[_Reader], None]) -> Callable[[_Reader], None]:
    def checked(reader: _Reader) -> None:
        build(reader)
        reader.note_tuple()

    return checked


def _encode(text: str, encoding: str) -> bytes:
    # Protocol 2 has no bytes, so that Python's pickler writes them as text in latin1.
    if encoding != "latin1":
        raise Fault(f"it encodes text as {encoding!r:.40}")
    return text.encode(encoding)


def _bytearray(data: bytes = b"") -> bytearray:
    # Never an integer, for which bytearray() would allocate so many bytes.
    return bytearray(_instance(data, bytes))


def _bytes() -> bytes:
    # In protocol 2, empty bytes are a call without arguments.
    return b""


def _set(items: Any) -> set[Any]:
    return set(_instance(items, list))


def _counter(items: Any) -> collections.Counter[Any]:
    return collections.Counter(_instance(items, dict))


def _ordered(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(items)


def _instance(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise Fault(f"it builds something of a {type(value).__name__}")
    return value


def _bounded(rebuild: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A tensor of not much more than its storage."""

    def rebuilt(storage: Any, *rest: Any) -> Tensor:
        tensor = rebuild(storage, *rest)
        if tensor.numel() * tensor.itemsize > max(_FREE_BYTES, storage._untyped_storage.nbytes()):
            raise Fault(f"a tensor of shape {list(tensor.shape)} is stored in too few bytes")
        return tensor

    return rebuilt


def _with_attributes(function: Any, kind: type, arguments: Any, state: Any) -> Any:
    """A tensor with additional attributes (torch.save writes them since 1.9)."""
    if not _is_callable(function) or kind is not Tensor or type(state) is not dict:
        raise Fault("it builds a tensor in an unknown way")
    tensor = _instance(function(*arguments), Tensor)
    if NUMPY_MARK in state:
        return tensor.numpy() if state[NUMPY_MARK] == "array" else tensor.numpy()[()]
    tensor.__dict__.update(state)
    return tensor


def _parameter(data: Tensor, requires_grad: bool, hooks: Any, state: Any = None) -> Tensor:
    """A parameter, with or without additional attributes."""
    parameter = rebuilders._rebuild_parameter(
        data, requires_grad, _instance(hooks, collections.OrderedDict)
    )  # type: ignore[no-untyped-call]
    parameter.__dict__.update(_instance({} if state is None else state, dict))
    return parameter  # type: ignore[no-any-return]


_FUNCTIONS: ValueDict = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "_codecs.encode": _encode,
    "torch.Size": torch.Size,
    "torch.Tensor": Tensor,
    "torch.device": torch.device,
    "torch.storage.UntypedStorage": UntypedStorage,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch._utils._rebuild_tensor_v2": _bounded(rebuilders._rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _bounded(rebuilders._rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
}
for _name, _function in {
    "set": _set,
    "complex": complex,
    "bytearray": _bytearray,
    "bytes": _bytes,
}.items():
    # Protocol 2 names the module of Python 2.
    _FUNCTIONS[f"__builtin__.{_name}"] = _FUNCTIONS[f"builtins.{_name}"] = _function
# Classes that a program may name as an argument, but not call.
_NOT_CALLABLE = ("torch.Tensor", "torch.storage.UntypedStorage")
_CALLABLE = [function for name, function in _FUNCTIONS.items() if name not in _NOT_CALLABLE]
# The table belongs to this class: Python's own unpickler is not changed.
for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _Reader.dispatch[_opcode[0]] = _checked_tuple(_Reader.dispatch[_opcode[0]])


def _is_callable(function: Any) -> bool:
    # By identity: an object of the program must not decide by its own __eq__.
    return any(function is allowed for allowed in _CALLABLE)


def _check_finite(value: Any, budget: int) -> None:
    """Reject a value that contains others so often, or so deeply, that a walk over it would take too long."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        budget -= 1
        if budget < 0 or depth > MAX_DEPTH:
            raise Fault("its values contain each other in a cycle")
        if isinstance(item, dict):
            waiting += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, (list, tuple, set)):
            waiting += [(inner, depth + 1) for inner in item]
