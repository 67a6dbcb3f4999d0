"""Compare the files of a checkpoint in a store with their digests. Files are read once, and not stored."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import xxhash

from automodel_ckpt.checkpoint.files.digests import digest_from, digest_of
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.merkle import (
    FileSlice,
    has_merkle_digest,
    merkle_digest,
    slices_by_file,
)
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.errors import Problem

_WHAT = "a file of the checkpoint is not what was saved: its digest differs"
_HINT = "use another checkpoint of this run, or push it again"
_SHOWN = 5


def digest_problems(
    run: RemoteRun, name: str, manifest: Manifest, files: Sequence[str]
) -> list[Problem]:
    """Return the problems of *files*, which are in the store with their sizes. Damaged tensors are named.

    Raises :class:`StoreError` if the store fails, and FileNotFoundError for a file that was removed meanwhile.
    """
    slices = slices_by_file(tensor for tree in manifest.trees.values() for tensor in tree.stored)
    problems = []
    with contextlib.closing(VerifiedRanges(run.store, name, manifest)) as ranges:
        for file in files:
            if has_merkle_digest(manifest.files[file]):
                of_file = slices.get(file, ())
                damage = _damage_by_slices(run, name, manifest, file, ranges, of_file)
            else:
                damage = _damage(run, name, manifest, file, ranges)
            if damage is not None:
                where = f"{run.store}/{name}/{file}"
                problems.append(Problem(_WHAT, where, _text(damage), _HINT))
    return problems


def _damage(
    run: RemoteRun, name: str, manifest: Manifest, file: str, ranges: VerifiedRanges
) -> list[str] | None:
    """Return the names of damaged tensors and values; None if the file is intact."""
    content = xxhash.xxh3_128()
    run.store.stream(f"{name}/{file}", content.update)
    if digest_from(content) == manifest.files[file].digest:
        return None
    # Only now, a second time: to find where the damage is.
    return ranges.damaged(file)


def _damage_by_slices(
    run: RemoteRun,
    name: str,
    manifest: Manifest,
    file: str,
    ranges: VerifiedRanges,
    slices: Sequence[FileSlice],
) -> list[str] | None:
    """Return what is damaged in a file whose digest is that of its slices' digests; None if the file is intact."""
    record = manifest.files[file]
    end = slices[0].stored.start if slices else record.size
    head = run.store.read_patiently(f"{name}/{file}", 0, end) if end else b""
    damaged = ranges.damaged(file)
    is_intact = merkle_digest(digest_of(head), slices) == record.digest
    return None if is_intact and not damaged else damaged


def _text(damaged: Sequence[str]) -> str:
    if not damaged:
        return "the damage is in no tensor"
    shown = list(damaged[:_SHOWN])
    if len(damaged) > _SHOWN:
        shown.append(f"{len(damaged) - _SHOWN} more")
    return f"damaged: {', '.join(shown)}"
