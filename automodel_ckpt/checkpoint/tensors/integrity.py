"""Whether the stored bytes of a tensor are those that were written, before its values are used. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.merkle import damaged, held_by_file
from automodel_ckpt.checkpoint.slices import Slice, Tensor
from automodel_ckpt.errors import CheckpointUnusable, Problem

_REMEDY = "restore the file from another copy; `ckpt verify` reports everything that is damaged"


def damaged_slices(root: Path, tensor: Tensor) -> list[Slice]:
    """The slices, in files relative to *root*, whose bytes differ from their digests. A slice without a digest cannot
    be compared. Raises OSError for a file that cannot be read."""
    found: list[Slice] = []
    for file, held in held_by_file([tensor]).items():
        found += damaged(root, file, [one for one in held if one.piece.digest is not None])
    return found


def damage_problem(root: Path, tensor: Tensor) -> Problem | None:
    """What is wrong with the stored bytes of a tensor; None where they are intact, or have no digest."""
    wrong = damaged_slices(root, tensor)
    if not wrong:
        return None
    places = ", ".join(sorted({f"slice at {list(piece.offsets)}" for piece in wrong})[:3])
    what = f"the tensor {tensor.fqn!r} is damaged: its digest differs"
    return Problem(what, str(root / wrong[0].file), places, _REMEDY)


def require_intact(root: Path, tensor: Tensor) -> None:
    """Raise :class:`CheckpointUnusable` for a tensor whose stored bytes are damaged."""
    if problem := damage_problem(root, tensor):
        raise CheckpointUnusable.all_of([problem])
