"""Rearrange the bytes of a checkpoint so that they compress better, and restore them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import Slice, contiguous_slices
from automodel_ckpt.convert.formats.nemo.tar_reading import TarFault
from automodel_ckpt.errors import CheckpointUnusable

# Also the unit of the rearrangement: another value is another format.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that differences refer to."""

    root: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes ``start .. start + nbytes`` of a file, elements of *itemsize* bytes, and the same tensor in the base.

    *base* is its slice in the files of the base; None if the base has no such slice.
    """

    start: int
    nbytes: int
    itemsize: int
    base: Slice | None


def segments_of(manifest: Manifest, base: Base | None) -> dict[str, list[Segment]]:
    """Map each file to the byte ranges of its tensors, in their order. It depends only on the two manifests."""
    in_base = _slices_by_key(base.manifest) if base is not None else {}
    found: dict[str, list[Segment]] = {}
    for key, stored in _slices_by_key(manifest).items():
        if stored.nbytes:
            itemsize = max(1, DTYPE_BITS[stored.dtype] // 8)
            segment = Segment(stored.start, stored.nbytes, itemsize, in_base.get(key))
            found.setdefault(stored.file, []).append(segment)
    for segments in found.values():
        segments.sort(key=lambda segment: segment.start)
    return found


def _slices_by_key(manifest: Manifest) -> dict[tuple[object, ...], Slice]:
    """Map (tree, whether it is a copy, name, dtype, offsets, sizes) to each slice; interleaved slices are one."""
    found: dict[tuple[object, ...], Slice] = {}
    for name, tree in manifest.trees.items():
        for is_copy, tensors in ((False, tree.tensors), (True, tree.copies)):
            for fqn, tensor in tensors.items():
                for stored in contiguous_slices(tensor):
                    key = (name, is_copy, fqn, stored.dtype, stored.offsets, stored.sizes)
                    found[key] = stored
    return found


def transformed(
    source: BinaryIO,
    size: int,
    segments: Sequence[Segment],
    base: Base | None,
    *,
    forward: bool,
) -> Iterator[bytes]:
    """Yield the content of a file of *size* bytes, rearranged (*forward*) or restored, in blocks.

    *source* is read from its beginning to its end.
    """
    position = 0
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        for segment in (*segments, Segment(size, 0, 1, None)):
            yield from _copied(source, segment.start - position)
            block_bytes = BLOCK_BYTES // segment.itemsize * segment.itemsize
            for offset in range(0, segment.nbytes, block_bytes):
                length = min(block_bytes, segment.nbytes - offset)
                reference = None
                if segment.base is not None and base is not None:
                    reference = _read_base(segment.base, base, offset, length, opened, stack)
                data = _read_exactly(source, length)
                yield _planes(data, segment.itemsize, reference, forward=forward)
            position = segment.start + segment.nbytes


def _planes(data: bytes, itemsize: int, reference: bytes | None, *, forward: bool) -> bytes:
    """Combine a block with *reference* by XOR and divide it into byte planes, or restore it."""
    values = np.frombuffer(data, np.uint8)
    if forward and reference is not None:
        values = values ^ np.frombuffer(reference, np.uint8)
    shape = (-1, itemsize) if forward else (itemsize, -1)
    # A size that is not a multiple is that of a damaged manifest; `Manifest.fault` excludes it.
    values = np.ascontiguousarray(values.reshape(shape).T).reshape(-1)
    if not forward and reference is not None:
        values = values ^ np.frombuffer(reference, np.uint8)
    return values.tobytes()


def _read_base(
    stored: Slice,
    base: Base,
    offset: int,
    length: int,
    opened: dict[str, int],
    stack: contextlib.ExitStack,
) -> bytes:
    """Read a part of a slice of the base. Files stay open until *stack* is closed."""
    if stored.file not in opened:
        descriptor = open_safely(base.root, stored.file)
        stack.callback(os.close, descriptor)
        opened[stored.file] = descriptor
    data = os.pread(opened[stored.file], length, stored.start + offset)
    if len(data) != length:
        raise CheckpointUnusable(
            "a file of the base is too short",
            where=str(base.root / stored.file),
            value=f"{len(data)} of {length} bytes at {stored.start + offset}",
            hint="run `ckpt verify` on the base",
        )
    return data


def _copied(source: BinaryIO, nbytes: int) -> Iterator[bytes]:
    while nbytes > 0:
        data = _read_exactly(source, min(nbytes, BLOCK_BYTES))
        nbytes -= len(data)
        yield data


def _read_exactly(source: BinaryIO, nbytes: int) -> bytes:
    data = source.read(nbytes)
    if len(data) != nbytes:
        raise TarFault("a file is shorter than its manifest states")
    return data
