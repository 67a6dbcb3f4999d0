"""Write the tree of an optimizer from a description: slices of files that another program wrote, and plain values.

The tree is a DCP directory like that of a save (``torch_save.py``). No tensor is read before it is written, and a
tensor that is stored in several slices is written in blocks, so that memory does not grow with the state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from automodel_ckpt.checkpoint.files.pickle_values import saved
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.formats.reading import metadata_of
from automodel_ckpt.checkpoint.manifest import Tree
from automodel_ckpt.checkpoint.slices import Box, Slice, Tensor, nbytes_of
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader
from automodel_ckpt.checkpoint.tensors.stored import whole

# A tensor in several slices is assembled in memory in blocks of at most this size.
_BLOCK_BYTES = 32 << 20

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value in a nested state dict; joined by dots, they are its flat name."""


@dataclass(slots=True)
class _DescribedTree(TreePlan):
    """A plan whose tensors are read from other files: it replaces what DCP's planner does for live tensors.

    *stored* has tensors below *root*, *numbers* the values of 0-dim F32 tensors, and *objects* plain values, by flat
    name.
    """

    root: Path = field(default_factory=Path)
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """The tensors as they are written, one slice each; a large tensor in several slices occurs several times."""
        found: list[Tensor] = []
        for fqn in self.numbers:
            found.append(_with_slice(fqn, "F32", (), Box((), ())))
        for fqn, tensor in self.stored.items():
            for box in _written_boxes(tensor):
                found.append(_with_slice(fqn, tensor.dtype, tensor.shape, box))
        return found

    def values(self) -> Iterator[tuple[str, bytes]]:
        """The plain values, as ``torch.save`` writes them."""
        for fqn, value in self.objects.items():
            yield fqn, bytes(saved(value))

    def fetch(self, tensor: Tensor) -> _Read:  # type: ignore[override]
        """The data of a slice of :meth:`tensors`, read when it is written."""
        (piece,) = tensor.slices
        if tensor.fqn in self.numbers:
            data = struct.pack("<f", self.numbers[tensor.fqn])
            return _Read(lambda: memoryview(data), piece.nbytes)
        source = self.stored[tensor.fqn]
        return _Read(partial(_bytes_of, self.root, source, piece.box), piece.nbytes)


@dataclass(frozen=True, slots=True)
class _Read:
    """*nbytes* bytes that are read from another file when they are written."""

    read: Callable[[], memoryview]
    nbytes: int

    def __call__(self) -> memoryview:
        return self.read()


def described_tree(
    name: str,
    directory: str,
    *,
    root: Path,
    stored: Mapping[KeyPath, Tensor],
    numbers: Mapping[KeyPath, float],
    objects: Mapping[KeyPath, Any],
) -> TreePlan:
    """Plan the tree *name* in *directory*. All values are named by their path in the nested state dict.

    *stored* are tensors in files below *root*, *numbers* become 0-dim F32 tensors, and *objects* plain values. The
    result goes to :func:`~automodel_ckpt.checkpoint.formats.torch_save.plan_jobs` and ``metadata_of``.
    """
    paths = [*stored, *numbers, *objects]
    plan = _DescribedTree(
        name,
        directory,
        {},
        nested=True,
        root=root,
        stored={_flat(path): tensor for path, tensor in stored.items()},
        numbers={_flat(path): number for path, number in numbers.items()},
        objects={_flat(path): value for path, value in objects.items()},
    )
    plan.metadata = _metadata(plan, {_flat(path): path for path in paths})
    return plan


def _metadata(plan: _DescribedTree, paths: Mapping[str, KeyPath]) -> Metadata:
    """The tree for torch's own reader, which needs the path of each flat name."""
    tensors: dict[str, Tensor] = {}
    for tensor in plan.tensors():
        slices = tensor.slices
        if tensor.fqn in tensors:
            slices = tensors[tensor.fqn].slices + slices
        tensors[tensor.fqn] = replace(tensor, slices=slices)
    metadata = metadata_of(Tree("torch_save", tensors, dict.fromkeys(plan.objects)))  # type: ignore[arg-type]
    return replace(metadata, planner_data=dict(paths))


def _flat(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def _with_slice(fqn: str, dtype: str, shape: tuple[int, ...], box: Box) -> Tensor:
    nbytes = nbytes_of(dtype, box.sizes)
    return Tensor(fqn, dtype, shape, (Slice(fqn, dtype, box.offsets, box.sizes, "", 0, nbytes),))


def _written_boxes(tensor: Tensor) -> Iterator[Box]:
    """Divide a tensor into the boxes that are written: one, unless it must be assembled and is large.

    A tensor in one slice is mapped, not read. A single row may be larger than a block.
    """
    filled = [piece for piece in tensor.slices if piece.nbytes]
    if len(filled) <= 1 or tensor.nbytes <= _BLOCK_BYTES:
        yield tensor.box
        return
    num_rows, *inner = tensor.shape
    row_bytes = nbytes_of(tensor.dtype, inner)
    step = max(1, _BLOCK_BYTES // row_bytes)
    zeros = (0,) * len(inner)
    for start in range(0, num_rows, step):
        yield Box((start, *zeros), (min(step, num_rows - start), *inner))


def _bytes_of(root: Path, tensor: Tensor, box: Box) -> memoryview:
    """Read the row-major bytes of a box."""
    if box != tensor.box or len(tensor.slices) != 1:
        return BoxReader(root, tensor).read(box).reshape(-1).view("u1").data
    # Mapped, not read.
    array = whole(root, tensor)
    return array.reshape(-1).view("u1").data
