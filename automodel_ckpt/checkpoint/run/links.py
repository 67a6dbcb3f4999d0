"""The symbolic links in a run directory: pins, links of users, and links to what has to be uploaded. No torch.

A link protects the checkpoint that it points to. When a checkpoint is renamed (superseded), its links are changed
first. A run that is killed between the two leaves links to a name that does not exist yet. They still protect the
checkpoint under its old name, and :func:`repair_links` changes them back.

For each checkpoint that a process has to upload, there is a link ``PREFIX + NAME``. The trainer creates the link when
it publishes a checkpoint. The process that uploads removes it afterwards. Which names mean the store of a run, and what
a start has fetched from one, is here, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from automodel_ckpt.base.durable_io import fsync_directory
from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.options import RemoteOptions
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import REPAIR
from automodel_ckpt.errors import os_problem

log = logging.getLogger("automodel_ckpt")


def protected_names(root: Path) -> set[str]:
    """List the checkpoints that must not be removed because a link in the run directory points to them.

    The links are LATEST, LOWEST_VAL, pins, and links of the user at any depth outside of the checkpoints. The text file
    of a pointer has the same effect as its link. A checkpoint that is itself a link is protected too.
    """
    names = set()
    top = root.resolve()
    for link in _links(root):
        target = Path(os.path.realpath(link))
        # A link to a file in a checkpoint protects the whole checkpoint.
        for path in (target, *target.parents):
            if path.parent == top:
                names.add(path.name)
        link_name = os.path.basename(link)
        if os.path.dirname(link) == str(root) and layout.is_checkpoint(link_name):
            names.add(link_name)
    for entry in os.scandir(root):
        if not entry.name.endswith(".txt"):
            continue
        pointed = commit.pointer_text(root, entry.name.removesuffix(".txt"))
        if pointed:
            names.add(pointed)
    for name in list(names):
        before = layout.name_before(name)
        if before is not None and not os.path.lexists(root / name):
            # A run was killed after it changed the link, and before it renamed the checkpoint.
            names.add(before)
    return names


def withdraw_unprotected(root: Path, name: str) -> Path | None:
    """Rename a checkpoint to a trash directory, which :func:`commit.discard` deletes, unless a link protects it.

    Returns the trash directory, or None when the checkpoint is protected. Raises OSError.
    """
    if name in protected_names(root):
        return None
    trash = commit.withdraw(root / name)
    # Checked again, because `ckpt pin` may have made a link meanwhile: it does not wait for the run.
    if name in protected_names(root):
        os.rename(trash, root / name)
        fsync_directory(root)
        return None
    return trash


def set_aside(root: Path, name: str) -> str:
    """Rename an abandoned checkpoint to the next free ``.superseded-N`` name, and change its links.

    Returns the new name. LATEST and LOWEST_VAL are not changed. Raises OSError if the checkpoint cannot be renamed. If
    a link cannot be changed, a warning is logged.
    """
    aside = commit.free_superseded_name(root, name)
    # In the other order, a kill would leave links with a name that a new checkpoint may get.
    _redirect(root, name, aside)
    commit.supersede(root, name, aside)
    return aside


def repair_links(root: Path) -> None:
    """Change back the links of a checkpoint that a killed run was about to rename; remove temporary links.

    Raises OSError.
    """
    for link in list(_links(root)):
        if layout.is_link_name(os.path.basename(link)):
            os.unlink(link)
    for aside in _superseded_names_in_links(root):
        before = layout.name_before(aside)
        if before is None or os.path.lexists(root / aside):
            continue
        if os.path.lexists(root / before):
            _redirect(root, aside, before)


def pinned_names(root: Path) -> set[str]:
    """List the checkpoints with a pin, including missing and superseded ones."""
    names = set()
    for entry in os.scandir(root):
        pointer = entry.name.removesuffix(".txt")
        if not layout.is_pin(pointer):
            continue
        name = pointer.removeprefix(layout.PIN)
        if commit.pointer_text(root, pointer) == name:
            names.add(name)
    return names


def make_room(path: Path) -> None:
    """Set aside (rename) a file or directory that has the *path* of a new checkpoint, and log a warning.

    Raises OSError.
    """
    aside = set_aside(path.parent, path.name)
    log.warning("%s has the name of a new checkpoint; renamed to %s", path, aside)


def _redirect(root: Path, old: str, new: str) -> None:
    """Change the pins and the users' links that point to the checkpoint *old*, so that they point to *new*."""
    if old in pinned_names(root):
        # The new pin first: after a kill between the two calls, the checkpoint is protected twice.
        commit.point(root, layout.PIN + new, new)
        commit.unpoint(root, layout.PIN + old)
    for link in _links(root):
        name = os.path.basename(link)
        is_at_top = os.path.dirname(link) == str(root)
        # Pins were replaced above, because their names contain the checkpoint's. Pointers are
        # updated after the next checkpoint is published.
        if is_at_top and (name in layout.POINTERS or layout.is_pin(name)):
            continue
        text = _text_after_renaming(root, link, old, new)
        if text is None:
            continue
        try:
            _replace_link(Path(link), text)
        except OSError as error:
            what = f"the link {link} could not be changed to {text} when {old} became {new}"
            log.warning("%s", os_problem(error, what, hint=REPAIR))


def _text_after_renaming(root: Path, link: str, old: str, new: str) -> str | None:
    """Return the link's target after *old* in the run directory is renamed to *new*, or None for other targets."""
    parts = PurePosixPath(_text_of(link)).parts
    for index, part in enumerate(parts):
        if part != old:
            continue
        parents = parts[:index]
        # Other runs have checkpoints of the same names: only those in this directory are renamed.
        directory = os.path.realpath(os.path.join(os.path.dirname(link), *parents))
        if directory == str(root.resolve()):
            return str(PurePosixPath(*parents, new, *parts[index + 1 :]))
    return None


def _replace_link(link: Path, text: str) -> None:
    # By rename: a kill between unlink and symlink would leave the checkpoint unprotected.
    temporary = link.with_name(layout.link_name())
    os.symlink(text, temporary)
    try:
        os.rename(temporary, link)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(link.parent)


def _superseded_names_in_links(root: Path) -> set[str]:
    """List the ``.superseded-N`` names that occur in links."""
    names = pinned_names(root)
    for link in _links(root):
        names.update(PurePosixPath(_text_of(link)).parts)
    return {name for name in names if layout.is_superseded(name)}


def _text_of(link: str) -> str:
    """Return the target text of a link; empty if the link was removed meanwhile."""
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""


def _links(directory: Path | str, at_top: bool = True) -> Iterator[str]:
    """Yield the symbolic links below a run directory, except those in directories that the program made.

    A subdirectory that is removed meanwhile is ignored. Raises OSError if the run directory cannot be read.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:
        if at_top:
            raise
        return
    for entry in entries:
        if entry.is_symlink():
            yield entry.path
            continue
        name = entry.name
        is_made_here = (
            layout.is_checkpoint(name) or layout.is_staging(name) or layout.is_trash(name)
        )
        if entry.is_dir(follow_symlinks=False) and not (at_top and is_made_here):
            yield from _links(entry.path, at_top=False)


# ---------------------------------------------------------------- uploads


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


def own_name(restore_from: str | None, settings: Any) -> str | None:
    """Return *restore_from*, without the URL of the run's store if it begins with it.

    *settings* are the options ``remote``, or the section of a recipe.
    """
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
