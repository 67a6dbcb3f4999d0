"""The checkpoints of a run in memory: directories on a tmpfs, which survive the trainer but not the machine.

They have the format of checkpoints on disk and are published in the same way, so a directory with a checkpoint's name
is complete. ``.memory.json`` in the run directory has a random identity, which is part of the directory's name. A run
directory that was deleted and created again, or copied, therefore never finds the checkpoints of the other run.

Memory checkpoints are usable only by the next start of the run. A start on another machine, or without the section
``checkpoint.memory``, makes them outdated: it replaces or removes the identity. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.manifest import Summary
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.durable_io import fsync_directory, fsync_file, replace_file
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, RecipeError

log = logging.getLogger("automodel_ckpt")

_PREFIX = "automodel_ckpt"
_OWNER = "owner.json"
_MAX_BYTES = 4096
_PRIVATE = 0o700


def open_memory(run: Path, parent: Path) -> Path:
    """Create the directory of *run*'s memory checkpoints in *parent*, or find that of an earlier start.

    *run* is an existing run directory, whose lease the caller holds. Directories in *parent* that no run refers to are
    removed. Raises OSError, and :class:`RecipeError` if another user owns the directory.
    """
    identity = _identity(run)
    if identity is None or _is_outdated(parent, identity, run):
        identity = uuid.uuid4().hex
        replace_file(run / layout.MEMORY, json.dumps({"id": identity}).encode() + b"\n")
    directory = parent / _name(identity)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, _PRIVATE)
    found = os.lstat(directory)
    # Anyone may create names in /dev/shm.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RecipeError(
            "the directory for memory checkpoints belongs to another user",
            where="checkpoint.memory.directory",
            value=str(directory),
            hint=f"remove {directory}, or set checkpoint.memory.directory to another tmpfs",
        )
    owner = {"run": str(run), "id": identity}
    replace_file(directory / _OWNER, json.dumps(owner).encode() + b"\n")
    # After the record is current: the run may have been moved.
    remove_orphans(parent)
    return directory


def memory_of(run: Path, parent: Path) -> Path | None:
    """Return the directory of *run*'s memory checkpoints in *parent*; None if there is none."""
    identity = _identity(run)
    if identity is None or _is_outdated(parent, identity, run):
        return None
    directory = parent / _name(identity)
    return directory if directory.is_dir() else None


def forget_memory(run: Path) -> None:
    """Make the memory checkpoints of *run* unusable, because the run continues without them. Called by rank 0."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(run / layout.MEMORY)
        log.info(
            "checkpoints in memory of earlier starts are not used: checkpoint.memory is not set"
        )


def copy_to_disk(directory: Path, run: Path) -> Path | None:
    """Publish the newest memory checkpoint in the directory *run*, unless it has one of its step or later.

    Returns the path of the copy, None if nothing was copied. The caller holds the lease of *run*. Raises OSError.
    """
    names = checkpoint_names(directory)
    on_disk = next(_complete_names(run), None)
    if not names or (on_disk is not None and on_disk.step >= names[0].step):
        return None
    name = str(names[0])
    Summary.read(directory / name)
    staging = run / layout.staging_name(name, uuid.uuid4().hex)
    try:
        shutil.copytree(directory / name, staging)
        for folder, _, files in os.walk(staging, topdown=False):
            for file in files:
                fsync_file(Path(folder, file))
            fsync_directory(Path(folder))
        published = commit.publish(staging, name)
        commit.point(run, layout.LATEST, name)
    except BaseException:
        commit.discard(staging)
        raise
    return published


def remove_memory(directory: Path) -> None:
    """Remove the directory of a run's memory checkpoints."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_orphans(parent: Path) -> None:
    """Remove this user's directories of memory checkpoints in *parent* that no run refers to any more.

    Those of a live run stay, since its run directory may be visible only in another container.
    """
    for entry in os.scandir(parent):
        if not entry.name.startswith(f"{_PREFIX}-{os.getuid()}-"):
            continue
        directory = Path(entry.path)
        owner = _owner(directory)
        if owner is None or _refers_to(*owner):
            continue
        with contextlib.suppress(OSError, AutomodelError):
            lease = Lease(directory)
            remove_memory(directory)
            lease.release()


def _owner(directory: Path) -> tuple[Path, str] | None:
    """Return the run directory and the identity that *directory* was created for; None if it has no record of them."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = parse_json(read_safely(directory, _OWNER, limit=_MAX_BYTES))
        return Path(record["run"]), str(record["id"])
    return None


def _refers_to(run: Path, identity: str) -> bool:
    """Whether *run* has the *identity*, or may have it: a file system may fail for a while."""
    try:
        os.stat(run / layout.MEMORY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return _identity(run) == identity


def _is_outdated(parent: Path, identity: str, run: Path) -> bool:
    """Whether the memory checkpoints of *identity* are on another machine, or belong to a run that *run* is a copy of.

    Without any on this machine, those on another one are older than what this start creates.
    """
    directory = parent / _name(identity)
    if not os.path.lexists(directory):
        return True
    owner = _owner(directory)
    if owner is None or _identity(owner[0]) != identity:
        # It was moved, or was killed before it wrote the record.
        return False
    return not os.path.samefile(owner[0], run)


def _identity(run: Path) -> str | None:
    """Return the identity in the run directory; None if it has none."""
    try:
        record = parse_json(read_safely(run, layout.MEMORY, limit=_MAX_BYTES))
        identity = record["id"]
        return str(uuid.UUID(hex=identity).hex)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointUnusable):
        return None


def _name(identity: str) -> str:
    return f"{_PREFIX}-{os.getuid()}-{identity}"


def _complete_names(run: Path) -> Iterator[layout.CheckpointName]:
    """Yield the names of the checkpoints on disk whose manifest can be read, newest first."""
    for name in checkpoint_names(run):
        with contextlib.suppress(OSError, CheckpointUnusable):
            Summary.read(run / str(name))
            yield name
