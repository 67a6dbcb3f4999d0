"""Commands and options of ``ckpt`` that earlier versions had, and what replaces them. Errors name the replacement."""

from __future__ import annotations

_MERGEKIT = "export the checkpoints (ckpt export), and merge the models with mergekit"

REMOVED = {
    "average --method": _MERGEKIT,
    "average --base": _MERGEKIT,
    "average --density": _MERGEKIT,
    "average --scale": _MERGEKIT,
    "average --seed": _MERGEKIT,
    "archive --delta": "remove it: archives have complete checkpoints",
}
"""A command with one of its options, and the hint of the error."""
