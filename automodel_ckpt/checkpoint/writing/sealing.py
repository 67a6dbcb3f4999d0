"""From the parts that the ranks wrote to a sealed checkpoint. Imports no torch: of an asynchronous save the leader's
writer process does it, since thousands of tensors keep an interpreter busy for as long as a training step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.writing.parts import Part, merge_files, merge_tree, placed_files
from automodel_ckpt.errors import SaveFailed


@dataclass(frozen=True, slots=True)
class Draft:
    """A manifest without what the ranks wrote: no trees, no files. *formats* and *tied* names of each tree to come."""

    manifest: Manifest
    formats: Mapping[str, str]
    tied: Mapping[str, Mapping[str, str]]


def part_files(staging: Path, num_ranks: int) -> list[Path]:
    """Where each rank leaves word of what it wrote."""
    return [staging / layout.part_file(rank) for rank in range(num_ranks)]


def parts_in(staging: Path, num_ranks: int) -> list[Part]:
    """What each rank says that it wrote. Raises OSError where one has not."""
    return [Part.parse(path.read_bytes()) for path in part_files(staging, num_ranks)]


def seal(staging: Path, draft: Draft, parts: Sequence[Part]) -> int:
    """Merge the parts into the manifest, and seal *staging* with it; returns the bytes of the checkpoint's files.

    Raises OSError, and :class:`SaveFailed` where the parts are not a whole checkpoint.
    """
    trees = {name: merge_tree(name, format, parts, draft.tied.get(name, {})) for name, format in draft.formats.items()}
    files = merge_files(parts) | placed_files(parts, (tensor for tree in trees.values() for tensor in tree.stored))
    manifest = replace(draft.manifest, created=time.time(), trees=trees, files=files)
    if fault := manifest.fault():
        name = layout.CheckpointName(step=manifest.step, epoch=manifest.epoch)
        raise SaveFailed(
            "the ranks did not write a whole checkpoint", where=str(staging.parent / str(name)), value=fault,
            remedy="please report this; the checkpoint before stands",
        )  # fmt: skip
    commit.seal(staging, manifest.to_bytes())
    return manifest.nbytes
