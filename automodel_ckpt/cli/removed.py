"""Commands and options of ``ckpt`` that earlier versions had, and what replaces them. Errors name the replacement."""

from __future__ import annotations

_MERGEKIT = "export the checkpoints (ckpt export), and merge the models with mergekit"

REMOVED = {
    "archive --delta": "remove it: archives have complete checkpoints",
    "average --method": _MERGEKIT,
    "average --base": _MERGEKIT,
    "average --density": _MERGEKIT,
    "average --scale": _MERGEKIT,
    "average --seed": _MERGEKIT,
    "card --output": "redirect its output: ckpt card PATH > README.md",
    "card -o": "redirect its output: ckpt card PATH > README.md",
    "export --to zarr": "export Hugging Face files (--to hf) or one file for torch.load (--to torch)",
    "import --group": "leave it out: all parameters are in one group, or in the groups of transformers' Trainer; "
    "otherwise import the weights without --training-state",
}
"""A command with one of its options, and their value if only that is gone, and the hint of the error."""
