"""Merge the rank manifests into the manifest and finalize the staging directory. Imports no torch.

For an asynchronous save, rank 0's writer process does it: with thousands of tensors it takes as long as a training
step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.writing.rank_manifest import (
    Part,
    merge_files,
    merge_tree,
    written_shared_files,
)
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed


@dataclass(frozen=True, slots=True)
class PartialManifest:
    """A manifest without trees and files; *formats* and *tied* are the formats and tied names of the trees by name."""

    manifest: Manifest
    formats: Mapping[str, str]
    tied: Mapping[str, Mapping[str, str]]


def part_files(staging: Path, num_ranks: int) -> list[Path]:
    """The paths of the rank manifests, in the order of the ranks."""
    return [staging / layout.part_file(rank) for rank in range(num_ranks)]


def parts_in(staging: Path, num_ranks: int) -> list[Part]:
    """Read the rank manifests, in the order of the ranks. Raises OSError where one is missing."""
    return [Part.parse(path.read_bytes()) for path in part_files(staging, num_ranks)]


def readable_bytes(manifest: Manifest, checkpoint: Path) -> bytes:
    """Serialize *manifest*, and read it back in the way that a resume reads it.

    Raises :class:`SaveFailed` where a reader would reject it: a checkpoint that cannot be read is never published.
    *checkpoint* is its final path, for the message.
    """
    data = manifest.to_bytes()
    try:
        Manifest.parse(data, checkpoint / layout.MANIFEST)
    except CheckpointUnusable as unreadable:
        problem = unreadable.problems[0]
        raise SaveFailed(
            "the checkpoint is not published, because it could not be read back",
            where=problem.where,
            value=f"{problem.what}: {problem.value}",
            hint="earlier checkpoints are unchanged; please report this",
        ) from unreadable
    return data


def seal(staging: Path, partial_manifest: PartialManifest, parts: Sequence[Part]) -> int:
    """Merge the parts into the manifest, and finalize *staging* with it; returns the bytes of the checkpoint's files.

    Raises OSError, and :class:`SaveFailed` where the result is not a checkpoint that can be read back.
    """
    trees: dict[str, Tree] = {}
    stored: list[Tensor] = []
    for tree_name, tree_format in partial_manifest.formats.items():
        tied = partial_manifest.tied.get(tree_name, {})
        tree = merge_tree(tree_name, tree_format, parts, tied)
        trees[tree_name] = tree
        stored.extend(tree.stored)
    files = merge_files(parts) | written_shared_files(parts, stored)
    manifest = replace(partial_manifest.manifest, created=time.time(), trees=trees, files=files)
    name = layout.CheckpointName(step=manifest.step, epoch=manifest.epoch)
    commit.seal(staging, readable_bytes(manifest, staging.parent / str(name)))
    return manifest.nbytes
