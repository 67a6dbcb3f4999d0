"""What a checkpoint can store: values that the reader of plain data restores exactly, and supported tensors.

Other values are reported, by attribute and key, before training.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.discovery import raw_bytes
from automodel_ckpt.checkpoint.files.pickle_values import has_counterpart, is_saved
from automodel_ckpt.checkpoint.formats.planning import DTYPE_CODES
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
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})
# Of containers in containers; the reader takes no more (tuples are hashed as keys, level by level).
_MAX_DEPTH = 25
# Of values that are met again because what holds them is held twice; the reader takes no more than twice as many.
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
    raise RecipeError.all_of(
        [
            Problem(
                "state that cannot be read back safely",
                f"recipe attribute {name!r}, key {key or '(the whole state)'!r}",
                found,
                f"store numbers, text, lists, dicts, tensors or NumPy arrays, or add {name!r} to the recipe's "
                "`untracked`",
            )
            for key, found in walk.unsafe
        ]
    )


def check_safe_values(name: str, tree: Mapping[str, Any]) -> None:
    """Check the values of a flat *tree* that are not tensors; tensors are checked when they are planned.

    Raises :class:`RecipeError` naming attribute and key of every value that cannot be read back safely.
    """
    for key, value in tree.items():
        if type(value) not in _SCALARS and not isinstance(value, torch.Tensor):
            check_safe(name, {key: value})


def check_storable(name: str, module: Mapping[str, Any]) -> None:
    """Raise :class:`RecipeError` naming the tensors of a module's state that cannot be stored in a checkpoint."""
    problems = [
        Problem(
            "a tensor that cannot be stored in a checkpoint",
            f"recipe attribute {name!r}, {key}",
            found,
            "register it with persistent=False, or store it in another format",
        )
        for key, value in module.items()
        if isinstance(value, torch.Tensor) and (found := _unstorable(value))
    ]
    if problems:
        raise RecipeError.all_of(problems)


def _unstorable(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_nested or local.layout != torch.strided or local.is_quantized:
        return f"it is nested, sparse or quantized: {str(local.layout).removeprefix('torch.')}, {local.dtype}"
    if local.dtype not in DTYPE_CODES:
        return str(local.dtype)
    return _shared_within(local)


def _shared_within(tensor: torch.Tensor) -> str:
    """The reason where elements of a tensor share memory, so that nothing can be read into it; else empty."""
    return (
        f"its elements share memory ({_CLONE})"
        if tensor.nbytes > tensor.untyped_storage().nbytes()
        else ""
    )


@dataclass(slots=True)
class _Walk:
    """Finds what is unsafe in a state and digests what is not, in one pass."""

    digest: Any = field(default_factory=xxhash.xxh3_128)
    unsafe: list[tuple[str, str]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _repeated: int = 0
    _dtypes: dict[int, torch.dtype] = field(default_factory=dict)

    def visit(self, key: str, value: Any, depth: int = 0, *, again: bool = False) -> None:
        kind = type(value)
        self.digest.update(f"{key}\0{kind.__name__}\0".encode(errors="surrogatepass"))
        if depth > _MAX_DEPTH:
            self.unsafe.append(
                (key, f"{_name(kind)}: containers nested more than {_MAX_DEPTH} levels deep")
            )
        elif kind in _TENSORS:
            self._tensor(key, value, depth)
        elif kind in _SCALARS:
            self.digest.update(_bytes_of(value))
        elif kind in _MAPPINGS or kind in _SEQUENCES:
            self._container(key, value, depth, again)
        elif (kind is np.ndarray or isinstance(value, np.generic)) and has_counterpart(value.dtype):
            self.digest.update(f"{value.dtype}{value.shape}".encode())
            self.digest.update(value.tobytes())
        else:
            self.unsafe.append((key, _name(kind)))

    def _container(self, key: str, value: Any, depth: int, again: bool) -> None:
        again = again or id(value) in self._seen
        self._seen.add(id(value))
        self._repeated += len(value) if again else 0
        if self._repeated > _MAX_REPEATED:
            if again:
                self.unsafe = [
                    (
                        key,
                        f"{_name(type(value))}: the same containers are referenced more than a million times",
                    )
                ]
            return
        attributes = vars(value) if type(value) is OrderedDict else {}
        if type(value) in _MAPPINGS:
            for name, element in {**value, **attributes}.items() if attributes else value.items():
                self.visit(f"{key}.{name}" if key else str(name), element, depth + 1, again=again)
                self._key(key, name)
        else:
            for index, element in enumerate(
                sorted(value, key=repr) if type(value) is set else value
            ):
                self.visit(f"{key}[{index}]", element, depth + 1, again=again)

    def _key(self, key: str, name: Any) -> None:
        within = _Walk() if type(name) is tuple else None
        if within is not None:
            within.visit("", name)
            self.unsafe += [(f"{key}, the key {name!r}", found) for _, found in within.unsafe]
        elif type(name) not in _SCALARS and not (
            isinstance(name, np.generic) and has_counterpart(name.dtype)
        ):
            self.unsafe.append((f"{key}, the key {name!r}", _name(type(name))))

    def _tensor(self, key: str, value: torch.Tensor, depth: int) -> None:
        found = self._unsaved(value)
        if found:
            self.unsafe.append((key, f"{_name(type(value))}: {found}"))
            return
        self.digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        self.digest.update(raw_bytes(value))
        for name, attribute in vars(value).items():
            self.visit(f"{key}.{name}", attribute, depth + 1)

    def _unsaved(self, value: torch.Tensor) -> str:
        if (
            value.is_nested
            or value.layout != torch.strided
            or value.is_quantized
            or value.device.type == "meta"
        ):
            return "it is nested, sparse, quantized or without values"
        if not is_saved(value.dtype):
            return str(value.dtype)
        address = value.untyped_storage().data_ptr()
        if address and self._dtypes.setdefault(address, value.dtype) != value.dtype:
            return f"it shares memory with a tensor of another type ({_CLONE})"
        return _shared_within(value)


def _bytes_of(value: Any) -> bytes | bytearray:
    if isinstance(value, bytes | bytearray):
        return value
    return (f"{value:x}" if type(value) is int else repr(value)).encode(errors="surrogatepass")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
