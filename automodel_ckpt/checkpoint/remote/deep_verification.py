"""Compare the files of a checkpoint in a store with their digests. Files are read once, and not stored."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import xxhash

from automodel_ckpt.checkpoint.files.durable_file import digest_from, digest_of
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.tree import (
    FileContents,
    damage_text,
    has_merkle_digest,
    merkle_digest,
)
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.errors import TAKE_ANOTHER, Problem

_WHAT = "a file of the checkpoint is not what was saved: its digest differs"


def digest_problems(
    run: RemoteRun, name: str, manifest: Manifest, files: Sequence[str]
) -> list[Problem]:
    """Return the problems of *files*, which are in the store with their sizes. Damaged tensors are named.

    Raises :class:`StoreError` if the store fails, and FileNotFoundError for a file that was removed meanwhile.
    """
    contents = FileContents(manifest.trees.values())
    problems = []
    with contextlib.closing(VerifiedRanges(run.store, name, manifest.trees.values())) as ranges:
        for file in files:
            record, of_file = manifest.files[file], contents.listed(file)
            damaged = None
            if has_merkle_digest(record):
                # Of the digests of its slices, which are compared with their content, too.
                end = of_file[0].stored.start if of_file else record.size
                head = run.store.read_patiently(f"{name}/{file}", 0, end) if end else b""
                damaged = ranges.damaged(file)
                is_intact = merkle_digest(digest_of(head), of_file) == record.digest
                is_intact = is_intact and not damaged
            else:
                content = xxhash.xxh3_128()
                run.store.stream(f"{name}/{file}", content.update)
                is_intact = digest_from(content) == record.digest
            if not is_intact:
                # Only now, a second time: to find where the damage is.
                found = ranges.damaged(file) if damaged is None else damaged
                problems.append(
                    Problem(_WHAT, f"{run.store}/{name}/{file}", damage_text(found), TAKE_ANOTHER)
                )
    return problems
