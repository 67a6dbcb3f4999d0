"""The header of a shard: writing it, and finding the files with exactly the header that a save writes. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from automodel_ckpt.checkpoint.files.digests import FileRecord
from automodel_ckpt.checkpoint.files.safe_open import begins_with
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import Slice
from automodel_ckpt.checkpoint.parts.tree import FileSlice, has_merkle_digest, head_fits

# A sector (files/direct.py): O_DIRECT reads and cloned blocks must begin at one.
ALIGN = 4096
Entry = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A slice in a shard: tensor name, dtype code, offsets, sizes, and the tensor's whole shape."""


def shard_header(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a shard with these slices in this order, and {tensor name: byte where its slice begins}."""
    # The keys of torch/distributed/checkpoint/_hf_utils.py; global_shape is an addition.
    sharding = {
        fqn: {"saved_offsets": list(offsets), "global_shape": list(shape)}
        for fqn, _, offsets, _, shape in entries
    }
    info = json.dumps(sharding, separators=(",", ":"))
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
    tensors = [(fqn, dtype, sizes) for fqn, dtype, _, sizes, _ in entries]
    return build_header(tensors, metadata, align=ALIGN)


def files_covered_by_slices(root: Path, manifest: Manifest) -> set[str]:
    """Return the files that consist of exactly the header that a save writes, and slices up to the end. A file that
    several ranks wrote is returned if its header matches its digest.

    The digests of their slices then verify every byte after the header, so the digest of the file needs no second
    read. A file that cannot be read, or has another header, is not among them.
    """
    slices_by_file: dict[str, list[tuple[Slice, Entry]]] = {}
    for tree in manifest.trees.values():
        for tensor in tree.tensors.values():
            for stored in tensor.slices:
                entry = (stored.fqn, stored.dtype, stored.offsets, stored.sizes, tensor.shape)
                slices_by_file.setdefault(stored.file, []).append((stored, entry))
    covered = set()
    for path, slices in slices_by_file.items():
        record = manifest.files[path]
        if has_merkle_digest(record):
            filled = [FileSlice(stored, shape) for stored, (*_, shape) in slices if stored.nbytes]
            filled.sort(key=lambda one: (one.stored.start, one.stored.offsets))
            if _head_fits(root, path, record, filled):
                covered.add(path)
        elif _is_covered(root, path, slices, manifest.files[path].size):
            covered.add(path)
    return covered


def _is_covered(
    root: Path, path: str, slices: Iterable[tuple[Slice, Entry]], file_bytes: int
) -> bool:
    # An empty slice begins where the next one does, and comes first in the header.
    ordered = sorted(slices, key=lambda item: (item[0].start, item[0].nbytes))
    try:
        header, starts = shard_header([entry for _, entry in ordered])
    except ValueError:
        return False
    # Byte by byte: a header that only parses to the same values could differ in bytes that no
    # digest of a slice covers.
    if not begins_with(root, path, header):
        return False
    if any(starts[stored.fqn] != stored.start for stored, _ in ordered):
        return False
    end = max(stored.start + stored.nbytes for stored, _ in ordered)
    return end == file_bytes


def _head_fits(root: Path, path: str, record: FileRecord, slices: Sequence[FileSlice]) -> bool:
    try:
        return head_fits(root, path, record, slices)
    except OSError:
        return False
