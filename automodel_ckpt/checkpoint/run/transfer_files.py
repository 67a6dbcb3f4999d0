"""What a run has to upload, what a start has fetched from a store, and which names mean that store.

For each checkpoint that a process has to upload, there is a link ``PREFIX + NAME`` in the run directory. The trainer
creates the link when it publishes a checkpoint. While it exists, the checkpoint is not removed. The process that
uploads removes it afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.options import RemoteOptions

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


# ---------------------------------------------------------------- downloads


DIRECTORY = ".fetched"
"""The directory in a run directory with a checkpoint that is only loaded, and then removed."""


def own_name(restore_from: str | None, settings: RemoteOptions | None) -> str | None:
    """Return *restore_from*, without the URL of the run's store if it begins with it."""
    if restore_from is None or settings is None or not is_url(restore_from):
        return restore_from
    url = settings.url.rstrip("/")
    name = restore_from.rstrip("/").removeprefix(f"{url}/")
    if restore_from.rstrip("/") == url:
        return layout.LATEST
    is_name = name in layout.POINTERS or layout.parse_checkpoint_name(name) is not None
    return name if is_name else restore_from


def options_for(url: str, settings: RemoteOptions | None) -> Values:
    """Return the options of the run's store for another *url*, if it is in a store of the same kind."""
    if settings is None or settings.url.partition("://")[0] != url.partition("://")[0]:
        return {}
    return settings.options


def remove_fetched(root: Path) -> None:
    """Remove what a start has fetched only to load it. Raises OSError."""
    path = root / DIRECTORY
    if path.is_symlink():
        # What it names is not ours.
        path.unlink()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
