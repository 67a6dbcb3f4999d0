"""What a checkpoint can store: values that the reader of plain data restores exactly, and supported tensors.

Other values are reported, by attribute and key, before training.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.formats.description import (
    DTYPE_CODES,
    local_tensor,
    unstorable_placement,
)
from automodel_ckpt.checkpoint.jobs.tensor_bytes import raw_bytes
from automodel_ckpt.checkpoint.pickles.pickle_values import has_counterpart, is_saved
from automodel_ckpt.errors import Problem, RecipeError

# Exact types: a subclass needs code to load.
_SCALARS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
    }
)
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})
# Levels of containers in containers. The reader accepts no more: it hashes tuples that are keys level by level.
_MAX_DEPTH = 25
# Visits of values in containers that are referenced more than once. The reader accepts at most twice as many.
_MAX_REPEATED = 1_000_000
_CLONE = "store a clone() of it"


def check_safe(name: str, state: Any) -> str:
    """Check that *state* can be read back without running code; return its digest.

    Raises :class:`RecipeError` naming attribute and key of every value that cannot.
    """
    walk = _Walk()
    walk.visit("", state)
    if not walk.unsafe:
        return cast(str, walk.digest.hexdigest())
    hint = (
        "store numbers, text, lists, dicts, tensors or NumPy arrays, "
        f"or add {name!r} to `untracked` of the recipe"
    )
    problems = []
    for key, found in walk.unsafe:
        where = f"attribute {name!r}, key {key or '(the whole state)'!r}"
        problems.append(Problem("state that cannot be read back safely", where, found, hint))
    raise RecipeError.all_of(problems)


def check_safe_values(name: str, tree: Values) -> None:
    """Check the values of a flat *tree* that are not tensors; tensors are checked when they are planned.

    Raises :class:`RecipeError` naming attribute and key of every value that cannot be read back safely.
    """
    for key, value in tree.items():
        if type(value) not in _SCALARS and not isinstance(value, Tensor):
            check_safe(name, {key: value})


def check_storable(name: str, tree: Values) -> None:
    """Raise :class:`RecipeError` naming the tensors of a flat *tree* that cannot be stored in a checkpoint."""
    problems = []
    for key, value in tree.items():
        found = _unstorable(value) if isinstance(value, Tensor) else ""
        if not found:
            continue
        problems.append(
            Problem(
                "a tensor that cannot be stored in a checkpoint",
                f"attribute {name!r}, {key}",
                found,
                "store it in another format, or leave it out (register a buffer with persistent=False)",
            )
        )
    if problems:
        raise RecipeError.all_of(problems)


def _unstorable(tensor: Tensor) -> str:
    """The reason why a tensor cannot be stored; empty where it can."""
    if placement := unstorable_placement(tensor):
        return f"the placement {placement}: no rank has its values (redistribute it to Replicate() or Shard())"
    local = local_tensor(tensor)
    if found := _form_of(local):
        return found
    if local.dtype not in DTYPE_CODES:
        return str(local.dtype)
    return _overlap_of(local)


def _form_of(tensor: Tensor) -> str:
    """The reason why no file can store tensors of this form; empty for ordinary ones."""
    if tensor.device.type == "meta":
        return "it is without values (on the device meta)"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        kind = str(tensor.layout).removeprefix("torch.")
        return f"it is nested, sparse or quantized: {kind}, {tensor.dtype}"
    return ""


def _overlap_of(tensor: Tensor) -> str:
    """The reason where elements of a tensor share memory, so that nothing can be read into it; else empty."""
    if tensor.nbytes <= tensor.untyped_storage().nbytes():
        return ""
    return f"its elements share memory ({_CLONE})"


@dataclass(slots=True)
class _Walk:
    """Finds what is unsafe in a state and digests what is not, in one pass."""

    digest: Any = field(default_factory=xxhash.xxh3_128)
    unsafe: list[tuple[str, str]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _repeated: int = 0
    _dtypes: dict[int, torch.dtype] = field(default_factory=dict)

    def visit(self, key: str, value: Any, depth: int = 0) -> None:
        """Visit a value under the dotted *key*, in *depth* containers."""
        kind = type(value)
        self.digest.update(f"{key}\0{kind.__name__}\0".encode(errors="surrogatepass"))
        if depth > _MAX_DEPTH:
            reason = f"{_name(kind)}: containers nested more than {_MAX_DEPTH} levels deep"
            self.unsafe.append((key, reason))
        elif kind in _TENSORS:
            self._tensor(key, value, depth)
        elif kind in _SCALARS:
            self.digest.update(_bytes_of(value))
        elif kind in _MAPPINGS or kind in _SEQUENCES:
            self._container(key, value, depth)
        elif (kind is np.ndarray or isinstance(value, np.generic)) and has_counterpart(value.dtype):
            self.digest.update(f"{value.dtype}{value.shape}".encode())
            self.digest.update(value.tobytes())
        elif isinstance(value, np.ndarray | np.generic):
            self.unsafe.append((key, f"{_name(kind)} of the type {value.dtype}"))
        else:
            self.unsafe.append((key, _name(kind)))

    def _container(self, key: str, value: Any, depth: int) -> None:
        kind = type(value)
        # Containers that contain themselves end at _MAX_DEPTH or, where they branch, at
        # _MAX_REPEATED.
        if id(value) in self._seen:
            self._repeated += len(value)
        self._seen.add(id(value))
        if self._repeated > _MAX_REPEATED:
            # A few nested containers can have billions of paths. This reason replaces all others.
            reason = "the same containers are referenced more than a million times"
            self.unsafe = [(key, f"{_name(kind)}: {reason}")]
            return
        if kind not in _MAPPINGS:
            # The order of a set differs between processes.
            elements = sorted(value, key=repr) if kind is set else value
            for index, element in enumerate(elements):
                self.visit(f"{key}[{index}]", element, depth + 1)
            return
        attributes = vars(value) if kind is OrderedDict else {}
        items = {**value, **attributes} if attributes else value
        for name, element in items.items():
            self.visit(f"{key}.{name}" if key else str(name), element, depth + 1)
            self._key(key, name)

    def _key(self, key: str, name: Any) -> None:
        """Check a key of a mapping."""
        kind = type(name)
        if kind is tuple:
            walk = _Walk()
            walk.visit("", name)
            reasons = [reason for _, reason in walk.unsafe]
        elif kind in _SCALARS or (isinstance(name, np.generic) and has_counterpart(name.dtype)):
            reasons = []
        else:
            reasons = [_name(kind)]
        for reason in reasons:
            self.unsafe.append((f"{key}, the key {name!r}", reason))

    def _tensor(self, key: str, value: Tensor, depth: int) -> None:
        found = self._unsaved(value)
        if found:
            self.unsafe.append((key, f"{_name(type(value))}: {found}"))
            return
        self.digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        self.digest.update(raw_bytes(value))
        for name, attribute in vars(value).items():
            self.visit(f"{key}.{name}", attribute, depth + 1)

    def _unsaved(self, value: Tensor) -> str:
        """The reason why a tensor in small state cannot be saved; empty where it can."""
        if found := _form_of(value):
            return found
        if not is_saved(value.dtype):
            return str(value.dtype)
        address = value.untyped_storage().data_ptr()
        # torch.save stores a storage once, with one dtype.
        if address and self._dtypes.setdefault(address, value.dtype) != value.dtype:
            return f"it shares memory with a tensor of another type ({_CLONE})"
        return _overlap_of(value)


def _bytes_of(value: Any) -> bytes | bytearray:
    """The bytes of a scalar for a digest."""
    if isinstance(value, bytes | bytearray):
        return value
    # Hexadecimal: the decimal text of an integer takes quadratic time, and Python limits its digits.
    text = f"{value:x}" if type(value) is int else repr(value)
    return text.encode(errors="surrogatepass")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
