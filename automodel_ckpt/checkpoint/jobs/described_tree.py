"""Write the tree of an optimizer from a description: slices of files that another program wrote, and plain values.

The tree is a DCP directory as a save writes it (``formats/rank_files.py``), and torch reads it. Tensors are read in
blocks while they are written, so that memory does not grow with the state. Imports no torch, which would take longer
than copying gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.jobs.jobs import Blocks, Chunk, Data, FileJob, archive_chunks
from automodel_ckpt.checkpoint.parts.slices import Tensor, boxes, whole_tensor
from automodel_ckpt.checkpoint.parts.tree import Blob
from automodel_ckpt.checkpoint.pickles.dcp_metadata import (
    DcpLocation,
    DcpMetadata,
    KeyPath,
    flat_name,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive, plain_archive
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader


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
        file = layout.distcp_file(self.directory, 0)
        # Only the name: torch's reader looks for the file next to .metadata.
        name = PurePosixPath(file).name
        chunks = []
        metadata = DcpMetadata()
        end = 0
        for path, value in self.objects.items():
            data = plain_archive(value)
            chunks.append(Chunk(end, data, Blob(flat_name(path), file, end, len(data), "")))
            metadata.add_value(path, DcpLocation(name, end, len(data)))
            end += len(data)
        for path, dtype, shape, content in self._tensors():
            archive = described_archive(dtype, shape)
            start = end + len(archive.head)
            tensor = whole_tensor(flat_name(path), dtype, shape, file, start)
            chunks += archive_chunks(archive.head, archive.tail, content, tensor)
            nbytes = len(archive.head) + tensor.nbytes + len(archive.tail)
            metadata.add_tensor(path, dtype, shape, DcpLocation(name, end, nbytes))
            end += nbytes
        yield FileJob(file, chunks, self.name, end)
        description = metadata.to_bytes()
        file = f"{self.directory}/{layout.DCP_METADATA}"
        yield FileJob(file, [Chunk(0, description)], nbytes=len(description))

    def _tensors(self) -> Iterator[tuple[KeyPath, str, Shape, Data]]:
        """Yield the path, dtype, shape and bytes of each tensor."""
        for path, number in self.numbers.items():
            yield path, "F32", (), struct.pack("<f", number)
        for path, tensor in self.stored.items():
            content = Blocks(tensor.nbytes, partial(_blocks_of, self.root, tensor))
            yield path, tensor.dtype, tensor.shape, content


def _blocks_of(root: Path, tensor: Tensor) -> Iterator[memoryview]:
    """Read the row-major bytes of a tensor."""
    reader = BoxReader(root, tensor)
    for box in boxes(tensor.shape):
        yield reader.read(box).reshape(-1).view("u1").data
