"""Verifying the stored bytes of a tensor before its values are used. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.parts.merkle import damaged, slices_by_file
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.errors import CheckpointUnusable, Problem

_HINT = "restore the file from another copy; `ckpt verify` reports everything that is damaged"


def damaged_slices(root: Path, tensor: Tensor) -> list[Slice]:
    """Return the slices, in files relative to *root*, whose bytes do not match their digests.

    Slices without a digest are skipped. Raises OSError if a file cannot be read.
    """
    found: list[Slice] = []
    for file, slices in slices_by_file([tensor], with_tables=True).items():
        found += damaged(root, file, [one for one in slices if one.stored.digest is not None])
    return found


def damage_problem(root: Path, tensor: Tensor) -> Problem | None:
    """Return the damage of a tensor's stored bytes; None if they match their digests, or have none."""
    wrong = damaged_slices(root, tensor)
    if not wrong:
        return None
    slices = sorted({f"slice at {list(stored.offsets)}" for stored in wrong})
    what = f"the tensor {tensor.fqn!r} is damaged: its digest differs"
    return Problem(what, str(root / wrong[0].file), ", ".join(slices[:3]), _HINT)


def require_intact(root: Path, tensor: Tensor) -> None:
    """Raise :class:`CheckpointUnusable` for a tensor whose stored bytes are damaged."""
    problem = damage_problem(root, tensor)
    if problem is not None:
        raise CheckpointUnusable.all_of([problem])
