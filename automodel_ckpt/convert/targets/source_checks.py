"""Validate what is exported, before anything is written."""

from __future__ import annotations

from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.errors import CheckpointUnusable


def check_files(source: Source) -> None:
    """Raise :class:`CheckpointUnusable` if a file of a checkpoint is missing or has another size than in the manifest.

    For exports that compare the bytes of each tensor with their digests when they read them.
    """
    if source.manifest is None:
        return
    problems = verify(source.root, source.manifest, "size")
    if problems:
        raise CheckpointUnusable.all_of(problems)


def check_digests(source: Source, num_threads: int = 5) -> None:
    """Raise :class:`CheckpointUnusable` if a file of a checkpoint or an export does not match its digest.

    For exports that write parts of the stored slices: only a whole slice has a digest.
    """
    problems = []
    if source.manifest is not None:
        problems = verify(source.root, source.manifest, "digest", num_threads=num_threads)
    elif source.export is not None:
        only = set(source.files)
        problems = source.export.problems(only=only, level="digest", rank=0, num_ranks=1)
    if problems:
        raise CheckpointUnusable.all_of(problems)
