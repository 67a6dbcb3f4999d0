"""The consistency of what a manifest lists: slices make up their tensors, are inside of files, and share no bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import OF_SLICES, FileRecord
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, contiguous_slices, nbytes_of
from automodel_ckpt.checkpoint.parts.tiling import interleaving_fault, shape_fault, tiling_fault
from automodel_ckpt.checkpoint.parts.tree import Blob, Tree

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import SliceTable

# The bytes of a row, and of a segment in the head, of a slice table.
ROW_BYTES, SEGMENT_BYTES = 20, 48

Files = Mapping[str, FileRecord]
"""The files of a checkpoint, by path."""
Trees = Mapping[str, Tree]
"""The trees of a checkpoint, by the name of their attribute."""


def file_fault(path: str, record: FileRecord) -> str | None:
    """Return what is wrong with the record of a file; None if nothing is."""
    if reason := layout.unsafe_path(path):
        return f"the file name {path!r}: {reason}"
    if record.size < 0:
        return f"the size of {path!r} is {record.size}"
    return None


def tree_fault(name: str, tree: Tree, files: Files) -> str | None:
    """Return the first tensor or value of *tree* that its slices or *files* do not make up; None if there is none."""
    for tensor in tree.stored:
        if tensor.dtype not in DTYPE_BITS:
            return f"{name}: the tensor {tensor.fqn!r} has the unknown dtype {tensor.dtype!r}"
        if reason := _slices_fault(tensor):
            return f"{name}: the tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {reason}"
        if misplaced := _misplaced(tensor, files):
            where = list(misplaced.offsets)
            return f"{name}: the slice at {where} of {tensor.fqn!r} is not in {misplaced.file!r}"
    for blob in tree.objects.values():
        if not is_in_file(blob, files):
            return f"{name}: the value {blob.fqn!r} is not in {blob.file!r}"
    for alias, stored in tree.tied.items():
        if stored not in tree.tensors:
            return f"{name}: {alias!r} is tied to {stored!r}, which is not stored"
    return None if tree.table is None else _table_fault(name, tree.table, files)


def _table_fault(name: str, table: SliceTable, files: Files) -> str | None:
    """Return why the file of a table cannot have the rows of its tensors; None if it can."""
    record = files.get(table.location.file)
    head_bytes = table.location.head_bytes
    file_bytes = head_bytes + table.num_rows * ROW_BYTES
    if record is None or record.size != file_bytes or head_bytes % SEGMENT_BYTES:
        return f"{name}: {table.location.file!r} is not the table of its {table.num_rows} slices"
    for file in table.files:
        if file not in files:
            return f"{name}: {file!r} is not among the files"
    return None


def _misplaced(tensor: Tensor, files: Files) -> Slice | None:
    """Return the first slice with a wrong size or outside of its file; None if there is none."""
    if not isinstance(tensor.slices, tuple):
        whole = tensor.slices.whole
        return None if whole is None or is_in_file(whole, files) else whole
    for stored in tensor.slices:
        if stored.nbytes != nbytes_of(stored.dtype, stored.sizes):
            return stored
    for stored in contiguous_slices(tensor):
        if not is_in_file(stored, files):
            return stored
    return None


def overlap_fault(trees: Trees, files: Files, *, with_tables: bool = False) -> str | None:
    """Describe the first two slices or values that share bytes of a file; None if there are none.

    *with_tables*: the slices in tables are compared, too. Raises :class:`CheckpointUnusable` for a damaged table.
    """
    parts: list[Slice | Blob] = []
    for name, tree in trees.items():
        parts += [blob for blob in tree.objects.values() if blob.nbytes]
        for tensor in tree.stored:
            parts += [stored for stored in _byte_ranges(tensor) if stored.nbytes]
        if with_tables and tree.table is not None:
            segments = _segments(name, tree.table)
            for segment in segments:
                if segment.start + segment.nbytes > files[segment.file].size:
                    return f"the slices of {name!r} exceed {segment.file!r}"
            # A segment of empty slices can begin where another slice does.
            parts += [segment for segment in segments if segment.nbytes]
    parts.sort(key=lambda part: (part.file, part.start))
    for one, other in itertools.pairwise(parts):
        if one.file == other.file and one.start + one.nbytes > other.start:
            return f"{one.fqn!r} and {other.fqn!r} share bytes of {one.file!r}"
    return None


def _segments(name: str, table: SliceTable) -> list[Blob]:
    """The byte ranges of the segments of a table. Slices in one do not overlap: each begins after the one before."""
    ranges = table.byte_ranges()
    return [
        Blob(f"slices of {name}", file, start, stop - start, "") for file, start, stop in ranges
    ]


def gap_fault(trees: Trees, files: Files) -> str | None:
    """Describe the first gap between slices of a file with a Merkle digest; None if there is none.

    A Merkle digest does not cover bytes in gaps, so damage there would not be detected.
    """
    slices_of: dict[str, list[Slice]] = {}
    for path, record in files.items():
        if record.digest.startswith(OF_SLICES):
            slices_of[path] = []
    for stored in _stored_slices(trees):
        if stored.nbytes and stored.file in slices_of:
            slices_of[stored.file].append(stored)
    for path, slices in slices_of.items():
        if slices and not _fill(slices, files[path].size):
            return f"the slices of {path!r} do not fill it"
    for tree in trees.values():
        for blob in tree.objects.values():
            if blob.file in slices_of:
                return f"{blob.fqn!r} is located in {blob.file!r}, among slices"
    return None


def _stored_slices(trees: Trees) -> Iterator[Slice]:
    for tree in trees.values():
        for tensor in tree.stored:
            yield from _byte_ranges(tensor)


def _fill(slices: list[Slice], size: int) -> bool:
    """Whether each of *slices* ends where the next one starts, and the last one where a file of *size* bytes ends."""
    slices.sort(key=lambda stored: stored.start)
    stops = [stored.start + stored.nbytes for stored in slices]
    next_starts = [stored.start for stored in slices[1:]]
    return stops == [*next_starts, size]


def is_in_file(stored: Slice | Blob, files: Files) -> bool:
    """Whether the bytes of a slice or value are within its file."""
    record = files.get(stored.file)
    if record is None or stored.start < 0:
        return False
    return 0 <= stored.nbytes <= record.size - stored.start


def _slices_fault(tensor: Tensor) -> str | None:
    """Return why the slices of a tensor do not make it up; None if they do."""
    if not isinstance(tensor.slices, tuple):
        return shape_fault(tensor.shape)  # A formula divides a tensor completely.
    boxes = [stored.box for stored in tensor.slices]
    return tiling_fault(boxes, tensor.shape) or interleaving_fault(tensor)


def _byte_ranges(tensor: Tensor) -> Sequence[Slice]:
    """Return the byte ranges of a tensor that the manifest itself describes: none for slices in a table."""
    if isinstance(tensor.slices, tuple):
        return contiguous_slices(tensor)
    whole = tensor.slices.whole
    return () if whole is None else (whole,)
