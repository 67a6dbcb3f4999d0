"""Write the tree of an optimizer from a description: slices of files that another program wrote, and plain values.

The tree is a DCP directory as a save writes it (``formats/torch_save.py``), and torch reads it. No tensor is read
before it is written, and a tensor that is stored in several slices is written in blocks, so that memory does not grow
with the state. Imports no torch, which would take longer than copying gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.slices import Box, Slice, Tensor, nbytes_of
from automodel_ckpt.checkpoint.parts.tree import Blob
from automodel_ckpt.checkpoint.pickles.dcp_metadata import (
    DcpChunk,
    DcpLocation,
    DcpMetadata,
    KeyPath,
    flat_name,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive, plain_archive
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.stored import whole

# A tensor in several slices is assembled in memory in blocks of at most this size.
_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class DescribedTree:
    """The tree *name* in *directory* of a checkpoint. All values are named by their path in the nested state dict.

    *stored* are tensors in files below *root*, *numbers* become 0-dim F32 tensors, and *objects* are plain values:
    dicts, lists, tuples, text, numbers, bools and None.
    """

    name: str
    directory: str
    root: Path
    stored: Mapping[KeyPath, Tensor]
    numbers: Mapping[KeyPath, float]
    objects: Mapping[KeyPath, Any]

    def jobs(self) -> Iterator[FileJob]:
        """Yield the job that writes all values, and the job of ``.metadata``, which torch needs to read the directory.

        Raises TypeError for an object that is not plain, and ValueError for two values of one name.
        """
        plan = _Plan(self, layout.distcp_file(self.directory, 0))
        plan.add_all()
        yield FileJob(plan.file, plan.chunks, self.name, plan.end)
        data = plan.metadata.to_bytes()
        file = f"{self.directory}/{layout.DCP_METADATA}"
        yield FileJob(file, [Chunk(0, data)], nbytes=len(data))


class _Plan:
    """The chunks of the file of *tree*, up to byte *end*, and their description for torch."""

    def __init__(self, tree: DescribedTree, file: str) -> None:
        self._tree = tree
        self.file = file
        self.chunks: list[Chunk] = []
        self.metadata = DcpMetadata()
        self.end = 0

    def add_all(self) -> None:
        """Add every value of the tree."""
        for path, value in self._tree.objects.items():
            self._add_object(path, value)
        for path, number in self._tree.numbers.items():
            data = struct.pack("<f", number)
            box = Box((), ())
            chunk = self._add_box(flat_name(path), "F32", (), box, partial(_view, data))
            self.metadata.add_tensor(path, "F32", (), [chunk])
        for path, tensor in self._tree.stored.items():
            parts: list[DcpChunk] = []
            for box in _written_boxes(tensor):
                read = partial(_bytes_of, self._tree.root, tensor, box)
                parts.append(self._add_box(flat_name(path), tensor.dtype, tensor.shape, box, read))
            self.metadata.add_tensor(path, tensor.dtype, tensor.shape, parts)

    def _add_object(self, path: KeyPath, value: Any) -> None:
        data = plain_archive(value)
        blob = Blob(flat_name(path), self.file, self.end, len(data), "")
        self.chunks.append(Chunk(self.end, data, blob))
        self.metadata.add_value(path, self._located(self.end, len(data)))
        self.end += len(data)

    def _add_box(
        self,
        fqn: str,
        dtype: str,
        shape: tuple[int, ...],
        box: Box,
        read: Callable[[], memoryview],
    ) -> DcpChunk:
        """Add the archive of a part of a tensor. Its bytes are read when they are written."""
        archive = described_archive(dtype, box.sizes)
        nbytes = nbytes_of(dtype, box.sizes)
        start = self.end
        data_start = start + len(archive.head)
        tail_start = data_start + nbytes
        self.end = tail_start + len(archive.tail)
        stored = Slice(fqn, dtype, box.offsets, box.sizes, self.file, data_start, nbytes)
        # The manifest's entry has only the raw bytes, torch's reader gets the whole archive.
        self.chunks.append(Chunk(start, archive.head))
        self.chunks.append(Chunk(data_start, read, Tensor(fqn, dtype, shape, (stored,))))
        self.chunks.append(Chunk(tail_start, archive.tail))
        return DcpChunk(box.offsets, box.sizes, self._located(start, self.end - start))

    def _located(self, start: int, nbytes: int) -> DcpLocation:
        # Only the name: torch's reader looks for the file beside .metadata.
        return DcpLocation(PurePosixPath(self.file).name, start, nbytes)


def _view(data: bytes) -> memoryview:
    return memoryview(data)


def _written_boxes(tensor: Tensor) -> Iterator[Box]:
    """Divide a tensor into the boxes that are written: one, unless it must be assembled and is large.

    A tensor in one slice is mapped, not read.
    """
    filled = [stored for stored in tensor.slices if stored.nbytes]
    if len(filled) <= 1 or tensor.nbytes <= _BLOCK_BYTES:
        yield tensor.box
        return
    yield from boxes(tensor.shape, _BLOCK_BYTES // nbytes_of(tensor.dtype, ()))


def _bytes_of(root: Path, tensor: Tensor, box: Box) -> memoryview:
    """Read the row-major bytes of a box."""
    if box != tensor.box or len(tensor.slices) != 1:
        return BoxReader(root, tensor).read(box).reshape(-1).view("u1").data
    # Mapped, not read.
    array = whole(root, tensor)
    return array.reshape(-1).view("u1").data
