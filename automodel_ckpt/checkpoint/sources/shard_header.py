"""The header of a shard: how a save writes it, and which files on disk begin with just that. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.slices import Slice

ALIGN = 4096
Entry = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A slice in a shard: tensor name, dtype code, offsets, sizes, and the tensor's whole shape."""


def shard_header(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int]]:
    """The header of a shard that holds these slices in this order, and the byte where each begins."""
    sharding = {
        fqn: {"saved_offsets": list(offsets), "global_shape": list(shape)}
        for fqn, _, offsets, _, shape in entries
    }
    info = json.dumps(sharding, separators=(",", ":"))
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
    return build_header(
        [(fqn, dtype, sizes) for fqn, dtype, _, sizes, _ in entries], metadata, align=ALIGN
    )


def sealed_by_slices(root: Path, manifest: Manifest) -> set[str]:
    """The files of a checkpoint that are a header, found to be as a save writes it, and slices from there to the end.

    What the manifest says of their slices is then all there is to check in them. A file that cannot be read, or has
    another header, is simply not among them.
    """
    found: dict[str, list[tuple[Slice, Entry]]] = {}
    for tree in manifest.trees.values():
        for tensor in tree.tensors.values():
            for piece in tensor.slices:
                entry = (piece.fqn, piece.dtype, piece.offsets, piece.sizes, tensor.shape)
                found.setdefault(piece.file, []).append((piece, entry))
    return {
        path
        for path, held in found.items()
        if _is_sealed(root, path, held, manifest.files[path].size)
    }


def _is_sealed(root: Path, path: str, held: Iterable[tuple[Slice, Entry]], file_bytes: int) -> bool:
    ordered = sorted(held, key=lambda item: (item[0].start, item[0].nbytes))
    try:
        header, starts = shard_header([entry for _, entry in ordered])
        descriptor = open_safely(root, path)
    except (ValueError, OSError):
        return False
    try:
        found = os.pread(descriptor, len(header), 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    in_place = all(starts[piece.fqn] == piece.start for piece, _ in ordered)
    end = max(piece.start + piece.nbytes for piece, _ in ordered)
    return found == header and in_place and end == file_bytes
