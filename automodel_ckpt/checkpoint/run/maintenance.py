"""Maintenance of the checkpoints of a run that is not training: pin, prune, drop optimizer state. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_directory, walk
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import NOT_SAVED, Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import links, resume
from automodel_ckpt.checkpoint.run.resume import KeepPolicy
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed, unusable


def pin(root: Path, name: str) -> None:
    """Protect a checkpoint from the keep policy with a link in the run directory."""
    # Without the lease, so that a user can pin during training: removals read the pins before and
    # after their rename (links.py).
    commit.point(root, layout.PIN + name, name)


def unpin(root: Path, name: str) -> bool:
    """Remove a pin, also of a missing checkpoint. Returns whether there was one."""
    pinned = commit.pointer_text(root, layout.PIN + name) is not None
    commit.unpoint(root, layout.PIN + name)
    return pinned


def pin_at(path: Path) -> tuple[Path, str] | None:
    """Return (run directory, name) of a pinned checkpoint, from its path or the pin's, or None when it has no pin.

    The checkpoint itself may be missing.
    """
    name = path.name.removesuffix(".txt").removeprefix(layout.PIN)
    if commit.pointer_text(path.parent, layout.PIN + name) != name:
        return None
    return path.parent, name


def superseded_names(root: Path) -> list[str]:
    """List the superseded checkpoints that no link protects.

    Not among them: directories without a manifest, which no save has written (:func:`.links.make_room`).
    """
    protected = links.protected_names(root)
    names = []
    for entry in os.scandir(root):
        if not layout.is_superseded(entry.name) or entry.name in protected:
            continue
        is_saved = os.path.lexists(os.path.join(entry.path, layout.MANIFEST))
        if is_saved and entry.is_dir(follow_symlinks=False):
            names.append(entry.name)
    return sorted(names)


def removable(
    root: Path, keep: KeepPolicy, *, metric_key: str, superseded: bool = False
) -> dict[str, int]:
    """Return the checkpoints that :func:`remove` should remove, oldest first, with the bytes that this frees.

    With *superseded*, also superseded ones.

    Never included: the newest checkpoint that has all files with their sizes, targets of links, what the policy
    keeps, and directories that are not complete checkpoints.
    """
    records = [*resume.records(root, metric_key)]
    protected = links.protected_names(root)
    # The records are newest first: the newest checkpoint that can be resumed from is never removed.
    for record in records:
        # Their contents are not read.
        with contextlib.suppress(CheckpointUnusable):
            checkpoint = root / record.name
            if not verify(checkpoint, Manifest.read(checkpoint), "size"):
                protected.add(record.name)
                break
    names = [record.name for record in keep.removable(records, protected)]
    if superseded:
        names += superseded_names(root)
    # Files that other checkpoints share stay on the disk.
    return dict(zip(names, freed_bytes([root / name for name in names]), strict=True))


def recover(root: Path) -> None:
    """Remove what killed commands and runs left. The caller has locked the directory. Raises OSError."""
    commit.recover(root)
    links.repair_links(root)


def remove(root: Path, names: Iterable[str], *, check_lease: Callable[[], None]) -> list[str]:
    """Remove checkpoints in order, except those that a link protects. Returns the names of the removed ones.

    *check_lease* is called before each removal. Raises OSError; a checkpoint that is already renamed to trash is then
    deleted at the next start or ``ckpt prune``.
    """
    removed = []
    for name in names:
        check_lease()
        trash = links.withdraw_unprotected(root, name)
        if trash is not None:
            commit.discard(trash)
            removed.append(name)
    return removed


def drop_optimizer(root: Path, name: str) -> int:
    """Remove the optimizer state of a checkpoint; return the bytes freed.

    Returns 0 if there is none, or if a link protects the checkpoint. The smaller checkpoint is built from hard links in
    a staging directory, finalized, and swapped with the other one atomically; no file is changed in place. Raises
    :class:`CheckpointUnusable` for a damaged manifest, :class:`SaveFailed` if the file system cannot swap directories.
    """
    if name in links.protected_names(root):
        return 0
    manifest = Manifest.read(root / name)
    slim = without_optimizer(manifest)
    dropped = manifest.files.keys() - slim.files.keys()
    if not dropped:
        return 0
    staging = commit.reserve(root, name)
    try:
        _link_files(root / name, staging, omit=dropped | {layout.MANIFEST})
        commit.finalize(staging, slim.to_bytes())
        # In one step: a kill between a removal and a rename would leave no checkpoint of this name.
        if not commit.exchange(staging, root / name):
            raise SaveFailed(
                "this file system cannot swap two directories in one step",
                where=root,
                value=name,
                hint="remove whole checkpoints instead: leave out --drop-optimizer",
            )
        # Durable before the files of the old checkpoint are deleted.
        fsync_directory(root)
    finally:
        # After the swap, the staging directory is the old checkpoint.
        commit.discard(staging)
    return sum(manifest.files[path].size for path in dropped)


def without_optimizer(manifest: Manifest) -> Manifest:
    """Copy a manifest without the state of optimizers and learning rate schedules."""
    state = dict(manifest.state)
    dropped = {}
    for name, record in manifest.state.items():
        if record.kind in ("optimizer", "lr_scheduler"):
            state[name] = replace(record, scope=NOT_SAVED)
            dropped[name] = record.path
    directories = tuple(dropped.values())
    trees = {name: tree for name, tree in manifest.trees.items() if name not in dropped}
    files = {}
    for path, file in manifest.files.items():
        # Each directory ends with a slash: optim/ does not match a file in optimizer_2/.
        if not path.startswith(directories):
            files[path] = file
    return replace(manifest, state=state, trees=trees, files=files)


def _link_files(source: Path, target: Path, *, omit: Collection[str]) -> None:
    """Hard-link the files of *source*, exports included, below *target*, except those in *omit*.

    Raises OSError also for a directory that cannot be read: its files would be lost.
    """
    for parent, directories, names in walk(source):
        relative = Path(parent).relative_to(source)
        for directory in directories:
            (target / relative / directory).mkdir()
        for name in names:
            path = (relative / name).as_posix()
            if path not in omit:
                os.link(source / path, target / path, follow_symlinks=False)
    emptied = {os.path.dirname(path) for path in omit} - {""}
    for directory in emptied:
        if not os.listdir(target / directory):
            os.rmdir(target / directory)


def run_of(checkpoint: Path) -> tuple[Path, str]:
    """Split a checkpoint's path into run directory and name. Raises :class:`CheckpointUnusable` for other paths."""
    if not layout.is_checkpoint(checkpoint.name):
        raise unusable(
            "not a checkpoint of a run",
            checkpoint,
            checkpoint.name,
            "use a path like checkpoints/epoch_0_step_20, or a pointer to it",
        )
    return checkpoint.parent, checkpoint.name


# ---------------------------------------------------------------- shared files


def repeated_bytes(checkpoints: Sequence[Path]) -> int:
    """Return the bytes that the sizes of *checkpoints* count more than once: shared files take their bytes once."""
    statuses = [status for checkpoint in checkpoints for status in _files(checkpoint)]
    sizes = {(status.st_dev, status.st_ino): status.st_size for status in statuses}
    return sum(status.st_size for status in statuses) - sum(sizes.values())


def freed_bytes(checkpoints: Sequence[Path]) -> list[int]:
    """Return the bytes that the removal of each of *checkpoints* frees, if they are removed in this order.

    A file is freed with its last name.
    """
    removed: Counter[tuple[int, int]] = Counter()
    freed = []
    for checkpoint in checkpoints:
        freed.append(0)
        for status in _files(checkpoint):
            inode = (status.st_dev, status.st_ino)
            removed[inode] += 1
            if removed[inode] >= status.st_nlink:
                freed[-1] += status.st_size
    return freed


def _files(directory: Path) -> Iterator[os.stat_result]:
    """Yield the status of the regular files below a directory. What disappears meanwhile is skipped."""
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if stat.S_ISREG(status.st_mode):
                    yield status
