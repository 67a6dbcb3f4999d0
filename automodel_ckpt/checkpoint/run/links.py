"""The symbolic links in a run directory: pins, and links of the user's own. Imports no torch.

A link protects the checkpoint that it leads to, and stays with it: when a checkpoint is set aside under another name,
the links are changed to the new name first. A run that is killed in between leaves links to a name that does not exist
yet; they still protect the checkpoint under its old name, and :func:`repair_links` changes them back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.durable_io import fsync_directory
from automodel_ckpt.errors import os_problem

log = logging.getLogger("automodel_ckpt")


def protected_names(root: Path) -> set[str]:
    """The checkpoints that must not be removed because a link in the run directory leads to them.

    The links are LATEST, LOWEST_VAL, pins, and the user's own, at any depth outside of the checkpoints. A pointer's
    text file counts like its link. A checkpoint that is itself a link (to a directory elsewhere) is protected too.
    """
    names: set[str] = set()
    top = root.resolve()
    for link in _links(root):
        target = Path(os.path.realpath(link))
        names |= {path.name for path in (target, *target.parents) if path.parent == top}
        if os.path.dirname(link) == str(root) and layout.is_checkpoint(os.path.basename(link)):
            names.add(os.path.basename(link))
    for entry in os.scandir(root):
        if entry.name.endswith(".txt") and (
            name := commit.pointer_text(root, entry.name.removesuffix(".txt"))
        ):
            names.add(name)
    for name in [*names]:
        before = layout.name_before(name)
        if before is not None and not os.path.lexists(root / name):
            names.add(
                before
            )  # a killed run had changed the link, and not yet the checkpoint's name
    return names


def withdraw_unprotected(root: Path, name: str) -> Path | None:
    """Take a checkpoint's name away, and return the trash directory that :func:`commit.discard` deletes.

    None, and the checkpoint stays, where a link leads to it by now. Links are looked for before and after: `ckpt pin`
    may make one at any time. Raises OSError.
    """
    if name in protected_names(root):
        return None
    trash = commit.withdraw(root / name)
    if name in protected_names(root):
        os.rename(trash, root / name)
        fsync_directory(root)
        return None
    return trash


def set_aside(root: Path, name: str) -> str:
    """Rename an abandoned checkpoint to the next free ``.superseded-N`` name, which is returned, with its links.

    LATEST and LOWEST_VAL are not changed: they belong to the run. Raises OSError where the checkpoint cannot be
    renamed; a link that cannot be changed is only reported.
    """
    aside = commit.free_superseded_name(root, name)
    _follow(root, name, aside)
    commit.supersede(root, name, aside)
    return aside


def repair_links(root: Path) -> None:
    """Change back the links of a checkpoint that a killed run was about to set aside; remove half-made ones.

    Raises OSError.
    """
    for link in [*_links(root)]:
        if layout.is_link_name(os.path.basename(link)):
            os.unlink(link)
    for aside in _announced_names(root):
        before = layout.name_before(aside)
        if (
            before is not None
            and not os.path.lexists(root / aside)
            and os.path.lexists(root / before)
        ):
            _follow(root, aside, before)


def pinned_names(root: Path) -> set[str]:
    """The checkpoints with a pin, whether they exist or not; also those that were set aside."""
    found = (entry.name.removesuffix(".txt") for entry in os.scandir(root))
    names = {pointer.removeprefix(layout.PIN) for pointer in found if layout.is_pin(pointer)}
    return {name for name in names if commit.pointer_text(root, layout.PIN + name) == name}


def _follow(root: Path, old: str, new: str) -> None:
    """Have pins and users' links that lead to the checkpoint *old* lead to the name *new*."""
    if old in pinned_names(root):
        commit.point(root, layout.PIN + new, new)
        commit.unpoint(root, layout.PIN + old)
    for link in _links(root):
        name = os.path.basename(link)
        is_own = os.path.dirname(link) == str(root) and (
            name in layout.POINTERS or layout.is_pin(name)
        )
        text = None if is_own else _text_after_renaming(root, link, old, new)
        if text is None:
            continue
        try:
            _change(Path(link), text)
        except OSError as error:
            what = f"the link {link} could not be changed when {old} became {new}"
            log.warning("%s", os_problem(error, what, hint=f"change it to point to {text}"))


def _text_after_renaming(root: Path, link: str, old: str, new: str) -> str | None:
    """The link's target after *old* in the run directory is renamed to *new*; None where it points elsewhere."""
    parts = PurePosixPath(_text_of(link)).parts
    for index, part in enumerate(parts):
        if part != old:
            continue
        holder = os.path.realpath(os.path.join(os.path.dirname(link), *parts[:index]))
        if holder == str(root.resolve()):
            return str(PurePosixPath(*parts[:index], new, *parts[index + 1 :]))
    return None


def _change(link: Path, text: str) -> None:
    temporary = link.with_name(layout.link_name(uuid.uuid4().hex))
    os.symlink(text, temporary)
    try:
        os.rename(temporary, link)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(link.parent)


def _announced_names(root: Path) -> set[str]:
    """The ``.superseded-N`` names that occur in links."""
    texts = [_text_of(link) for link in _links(root)]
    names = {part for text in texts for part in PurePosixPath(text).parts}
    return {name for name in names | pinned_names(root) if layout.is_superseded(name)}


def _text_of(link: str) -> str:
    """The target text of a link; empty where the link has vanished."""
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""


def _links(directory: Path | str, at_top: bool = True) -> Iterator[str]:
    """The symbolic links below a run's directory. What vanishes meanwhile is passed over below it, not at its top."""
    try:
        entries = [*os.scandir(directory)]
    except OSError:
        if at_top:
            raise
        return
    for entry in entries:
        if entry.is_symlink():
            yield entry.path
        elif entry.is_dir(follow_symlinks=False) and not (at_top and _is_made_by_runs(entry.name)):
            yield from _links(entry.path, at_top=False)


def _is_made_by_runs(name: str) -> bool:
    """Whether a directory of this name is made by the program, so that no link in it is the user's."""
    return layout.is_checkpoint(name) or layout.is_staging(name) or layout.is_trash(name)
