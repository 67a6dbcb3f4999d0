"""What a checkpoint can store, and its bytes: values that the reader of plain data restores, and supported tensors.

Other values are reported, by attribute and key, before training. A rank stores its part of a DTensor. Plain data is
written by ``torch.save``. NumPy's arrays and numbers go in as tensors that know what they were: such a file still holds
nothing but what ``torch.load(weights_only=True)`` takes, and our own reader (``pickles/pickle_reader.py``) converts
them back.

The row-major bytes of tensors on the CPU are used in place if possible. Those on a GPU go through two buffers: an
ordinary copy from a GPU goes through a buffer of the driver, and the next one begins when the host has taken the data.
Here, the GPU fills one page-locked buffer while the host digests and writes the other.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.files.durable_file import begins_at_a_sector
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.parts.slices import Box, whole_box
from automodel_ckpt.errors import Problem, RecipeError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

log = logging.getLogger("automodel_ckpt")

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in TORCH_NAMES.items()}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

NUMPY_MARK = "automodel_ckpt.numpy"
"""The attribute of a tensor that was NumPy's: ``array`` or ``scalar``."""


class Pickler(pickle.Pickler):
    """The pickler that ``torch.save`` derives from; it looks up this name in the module that it is given."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic):
            return NotImplemented
        # A copy, because from_numpy rejects negative strides and warns about read-only arrays.
        tensor = torch.from_numpy(np.array(value))
        setattr(tensor, NUMPY_MARK, "array" if isinstance(value, np.ndarray) else "scalar")
        # torch.save uses protocol 2.
        return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def saved(value: Any) -> memoryview:
    """Return the content of a file with *value*.

    Call :func:`~automodel_ckpt.checkpoint.state.storable.check_safe` before: it raises for values that cannot be read.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=sys.modules[__name__])
    return buffer.getbuffer()


def has_counterpart(dtype: np.dtype[Any]) -> bool:
    """Whether torch has this type of NumPy's, in this byte order."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).numpy().dtype == dtype
    except (TypeError, ValueError):
        return False


@functools.cache
def is_saved(dtype: torch.dtype) -> bool:
    """Whether ``torch.save`` knows this type."""
    try:
        torch.save(torch.empty(0, dtype=dtype, device="cpu"), io.BytesIO())
    except (KeyError, RuntimeError):
        return False
    return True


# ---------------------------------------------------------------- sharded tensors


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether *value* is a ``DTensor``."""
    # There is none where its module is not imported yet, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def unstorable_placement(tensor: Tensor) -> str:
    """The placement of a DTensor that is neither sharded nor replicated (partial sums); empty if there is none."""
    if not is_sharded(tensor):
        return ""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    for placement in tensor.placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            return repr(placement)
    return ""


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    # Not to_local(), which makes a node for autograd: that takes longer than writing a small tensor.
    return tensor._local_tensor if is_sharded(tensor) else tensor


def local_box(value: Tensor) -> Box | None:
    """The box of a tensor that this rank has; None for a DTensor on a mesh without this rank."""
    if not is_sharded(value):
        return whole_box(tuple(value.shape))
    if value.device_mesh.get_coordinate() is None:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return Box(tuple(offsets), tuple(sizes))


# ---------------------------------------------------------------- bytes


BLOCK_BYTES = 32 << 20
_OFFSET = 64
"""Bytes from a sector's start to memory that is not aligned for O_DIRECT."""

Allocate = Callable[[int], Tensor]
"""Takes a number of bytes, and returns a uint8 tensor of this size in host memory."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that may be in progress: *target* on the host, complete after *event*; None: complete now."""

    target: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> memoryview:
        if self.event is not None:
            self.event.synchronize()
        return self.target.numpy().data


def raw_bytes(tensor: Tensor) -> memoryview:
    """The row-major bytes of a tensor: its memory where it is contiguous and on the CPU, else a copy."""
    # A view of live memory if possible: the caller reads it before training changes the tensor.
    return flat_bytes(tensor.to("cpu")).numpy().data


def flat_bytes(tensor: Tensor) -> Tensor:
    """The row-major bytes of a tensor on its device: of shape (bytes,), a view where it is contiguous, else a copy."""
    contiguous = tensor.detach().contiguous()
    # A lazy conjugation or negation is not in the bytes yet.
    if contiguous.is_conj() or contiguous.is_neg():
        contiguous = contiguous.resolve_conj().resolve_neg()
    return contiguous.reshape(-1).view(torch.uint8)


def page_locked(nbytes: int) -> Tensor:
    """Return *nbytes* of page-locked memory, or of ordinary memory where the system does not allow it."""
    try:
        # torch keeps freed page-locked memory for the next save.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.debug("page-locked memory is not available: %s", error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def blocks_of(
    flat: Tensor, *, block_bytes: int = BLOCK_BYTES, allocate: Allocate = page_locked
) -> Iterator[memoryview]:
    """Yield the bytes of *flat*, a uint8 vector on any device, in blocks. A block is valid until the next one.

    At most two buffers of *block_bytes* are used.
    """
    size = min(block_bytes, flat.numel())
    buffers = [_unaligned(allocate(size + _OFFSET))]
    if flat.numel() > block_bytes:
        buffers.append(_unaligned(allocate(size + _OFFSET)))
    earlier: _Copy | None = None
    for number, start in enumerate(range(0, flat.numel(), block_bytes)):
        part = flat[start : start + block_bytes]
        # The caller has finished with the block that was in this buffer.
        copy = _begin(buffers[number % len(buffers)][: part.numel()], part)
        if earlier is not None:
            yield earlier.wait()
        earlier = copy
    if earlier is not None:
        yield earlier.wait()


def _unaligned(memory: Tensor) -> Tensor:
    """Return a view of *memory*, at most _OFFSET bytes shorter, that is not aligned for O_DIRECT.

    An aligned block would be written later, directly from the buffer, which has other data by then.
    """
    view = memory.numpy().data
    return memory[_OFFSET:] if begins_at_a_sector(view) else memory[: len(memory) - _OFFSET]


def _begin(target: Tensor, source: Tensor) -> _Copy:
    target.copy_(source, non_blocking=True)
    if not source.is_cuda:
        return _Copy(target, None)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(source.device))
    return _Copy(target, event)


# ---------------------------------------------------------------- what can be stored


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
