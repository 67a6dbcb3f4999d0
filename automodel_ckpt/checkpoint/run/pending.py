"""Checkpoints that a process has to upload: a link ``PREFIX + NAME`` in the run directory for each of them.

The trainer creates the link when it publishes a checkpoint. While it exists, the checkpoint is not removed. The process
that uploads removes it afterwards.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout

TO_STORE = ".upload-"
"""The prefix of links to checkpoints that have to be uploaded to an object store."""
TO_HUB = ".hub-"
"""The same for the Hugging Face Hub."""


def pending(root: Path, prefix: str) -> list[str]:
    """List the checkpoints that have to be uploaded, newest first. Links to removed ones are deleted."""
    names = []
    for entry in list(os.scandir(root)):
        if not entry.name.startswith(prefix) or not entry.is_symlink():
            continue
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            # The trainer and the uploading process both call this, and the latter removes links.
            continue
        parsed = layout.parse_checkpoint_name(target)
        if parsed is None or not (root / target).is_dir():
            # Superseded, or removed by hand.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
        else:
            names.append(parsed)
    return [str(name) for name in sorted(names, reverse=True)]


def link(root: Path, prefix: str, name: str) -> None:
    """Note that a checkpoint has to be uploaded."""
    with contextlib.suppress(FileExistsError):
        os.symlink(name, root / f"{prefix}{name}")


def unlink(root: Path, prefix: str, name: str) -> None:
    """Remove the link of a checkpoint that has to be uploaded, and the record of how far its upload is."""
    (root / f"{prefix}{name}").unlink(missing_ok=True)
    (root / f"{prefix}{name}.json").unlink(missing_ok=True)


def clear_links(root: Path, prefix: str) -> None:
    """Remove all links: a run that uploads nothing must not keep its checkpoints for them."""
    for entry in list(os.scandir(root)):
        is_link = entry.name.startswith(prefix) and entry.is_symlink()
        if is_link:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def step_of(name: str) -> int:
    """The step in the name of a checkpoint; -1 for any other name."""
    parsed = layout.parse_checkpoint_name(name)
    return parsed.step if parsed else -1
