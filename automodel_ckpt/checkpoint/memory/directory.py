"""The checkpoints of a run in memory: directories on a tmpfs, which survive the trainer but not the machine.

They have the format of checkpoints on disk and are published in the same way, so a directory with a checkpoint's name
is complete. ``.memory.json`` in the run directory has a random identity, which is part of the directory's name. A run
directory that was deleted and created again, or copied, therefore never finds the checkpoints of the other run.

Memory checkpoints are usable only by the next start of the run. A start on another machine, or without the section
``checkpoint.memory``, makes them outdated: it replaces or removes the identity. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import text
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note
from automodel_ckpt.errors import AutomodelError, RecipeError

log = logging.getLogger("automodel_ckpt")

_PREFIX = "automodel_ckpt"
_OWNER = "owner.json"
_MAX_BYTES = 4096
_PRIVATE = 0o700
GENERATION = "memory_generation"
"""The key in the manifest's ``environment`` with the generation that saved a memory checkpoint."""


@dataclass(frozen=True)
class MemoryRecord:
    """Which memory checkpoints a run directory refers to: the content of ``.memory.json``.

    *identity* is a part of the name of their directory. The usable ones were saved in the present *generation*, which
    each start begins, and after the checkpoint in memory with the digest *base* that the start loaded, or are that one.
    Nodes that were not reachable may have others.
    """

    identity: str
    generation: str = ""
    base: str = ""

    @classmethod
    def read(cls, run: Path) -> MemoryRecord | None:
        """Read the record of the directory *run*. Returns None when it has none."""
        found = read_note(run, layout.MEMORY, _MAX_BYTES)
        try:
            identity = uuid.UUID(hex=found["id"]).hex
            return cls(identity, str(found.get("generation", "")), str(found.get("base", "")))
        except Damaged:
            return None

    @classmethod
    def create(cls) -> MemoryRecord:
        """Return the record of a run without memory checkpoints."""
        return cls(uuid.uuid4().hex)

    def is_current(self, summary: Summary) -> bool:
        """Whether the memory checkpoint with this manifest is of the present generation of the run."""
        generation = summary.environment.get(GENERATION)
        return (bool(generation) and generation == self.generation) or summary.digest == self.base

    def next(self, base: str) -> MemoryRecord:
        """Return the record of the next generation, which continues the memory checkpoint *base*; empty: none."""
        return MemoryRecord(self.identity, uuid.uuid4().hex, base)

    def write(self, run: Path) -> None:
        """Replace the record of the directory *run*. The caller holds its lease. Raises OSError."""
        fields = {"id": self.identity, "generation": self.generation, "base": self.base}
        write_note(run / layout.MEMORY, fields)


def make_directory(parent: Path, identity: str) -> Path:
    """Create the directory of the memory checkpoints of *identity* in *parent*, or find it.

    Raises OSError, and :class:`RecipeError` if another user owns it.
    """
    directory = parent / _name(identity)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, _PRIVATE)
    if not _is_own(directory):
        raise RecipeError(
            "the directory for memory checkpoints belongs to another user",
            where="checkpoint.memory.directory",
            value=str(directory),
            hint=f"remove {directory}, or set checkpoint.memory.directory to another tmpfs",
        )
    return directory


def _is_own(directory: Path) -> bool:
    """Whether this is a directory that this user has created: anyone may create names in /dev/shm."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def claim_directory(directory: Path, run: Path, identity: str) -> None:
    """Record that *directory* belongs to *run*. Others next to it that no run refers to are removed. Raises OSError."""
    write_note(directory / _OWNER, {"run": str(run), "id": identity})
    # After the record is current: the run may have been moved.
    remove_orphans(directory.parent)


def memory_of(run: Path, parent: Path) -> Path | None:
    """Return the directory of *run*'s memory checkpoints in *parent*, or None when there is none."""
    identity = _identity(run)
    if identity is None or is_outdated(parent, identity, run):
        return None
    directory = parent / _name(identity)
    return directory if directory.is_dir() else None


def remove_memory(directory: Path) -> None:
    """Remove the directory of a run's memory checkpoints."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_orphans(parent: Path) -> None:
    """Remove this user's directories of memory checkpoints in *parent* that no run refers to any more.

    The memory checkpoints of a live run stay, since its run directory may be visible only in another container. They
    also stay if the parent of a run directory is missing, because its disk is not mounted.
    """
    for entry in os.scandir(parent):
        directory = Path(entry.path)
        if not entry.name.startswith(f"{_PREFIX}-{os.getuid()}-") or not _is_own(directory):
            continue
        owner = _owner(directory)
        with contextlib.suppress(OSError, AutomodelError):
            if owner is not None and _is_orphan(*owner):
                lease = Lease(directory)
                remove_memory(directory)
                lease.release()


def _owner(directory: Path) -> tuple[Path, str] | None:
    """Return the run directory and the identity that *directory* was created for, or None without a record."""
    record = read_note(directory, _OWNER, _MAX_BYTES)
    with contextlib.suppress(*Damaged):
        run, identity = text(record["run"]), text(record["id"])
        if run.startswith("/") and "\0" not in run:
            return Path(run), identity
    return None


def _is_orphan(run: Path, identity: str) -> bool:
    """Whether no run refers to the memory checkpoints of *identity*, which *run* had.

    Raises OSError where that is unknown now.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(run / layout.MEMORY)
        # A record that cannot be read may have the identity.
        if _identity(run) in (None, identity):
            return False
    try:
        # A run that was renamed is found in the same parent directory.
        return all(_identity(path) != identity for path in run.parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_outdated(parent: Path, identity: str, run: Path) -> bool:
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
    """Return the identity in the run directory, or None when it has none."""
    record = MemoryRecord.read(run)
    return None if record is None else record.identity


def _name(identity: str) -> str:
    return f"{_PREFIX}-{os.getuid()}-{identity}"
