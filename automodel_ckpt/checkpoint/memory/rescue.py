"""Copy memory checkpoints to the disk of their run, when it ends with a failure that no restart follows.

The launcher of each node copies what the memory of its node has. With several nodes, all copy into one staging
directory. Its name follows from the save. One of them publishes the checkpoint when all parts are there. Where a node
was lost without a copy, it stays incomplete, and the next start removes it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_directories, fsync_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.memory.directory import MemoryRecord, memory_of, remove_memory
from automodel_ckpt.checkpoint.memory.save_files import bring_back, files_below, save_digest
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import REPAIR, RESUME
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Summary
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import links
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.errors import (
    AutomodelError,
    CheckpointUnusable,
    Problem,
    RecipeError,
    describe,
    os_problem,
    unusable,
)

_LEASE_SECONDS = 30.0
"""How long to wait for the launchers of other nodes, which publish their copy at the same time."""
_WAIT_SECONDS = 60.0
"""How long to wait for the parts of other nodes."""
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class _Copy:
    """The copy of a save, with the *digest* of its manifest: the directory *staging* becomes the checkpoint *final*."""

    staging: Path
    final: Path
    digest: str
    record: MemoryRecord

    @classmethod
    def of(cls, run: Path, name: str, digest: str, record: MemoryRecord) -> _Copy:
        # The same for all nodes.
        unique = uuid.uuid5(uuid.NAMESPACE_OID, digest).hex
        return cls(run / layout.staging_name(name, unique), run / name, digest, record)

    @property
    def is_published(self) -> bool:
        """Whether this or another node has published the copy."""
        with contextlib.suppress(OSError, CheckpointUnusable):
            return Summary.read(self.final).digest == self.digest
        return False

    @property
    def is_complete(self) -> bool:
        """Whether it is published, or has the manifest, which is of the present generation, and all files in it."""
        if self.is_published:
            return True
        with contextlib.suppress(OSError, CheckpointUnusable):
            if self.record.is_current(Summary.read(self.staging)):
                files = Manifest.read(self.staging).files.items()
                return all(
                    (self.staging / file).stat().st_size == each.size for file, each in files
                )
        return False


def copy_to_disk(directory: Path, run: Path, wait_seconds: float = _WAIT_SECONDS) -> Path | None:
    """Copy the checkpoints in *directory*, the memory of this node, to the directory *run*, and publish the newest.

    Nothing is copied that is older than the newest checkpoint of *run*, or that the run has abandoned. Returns the path
    of what this or another node has published, None when *run* has a later one. Raises :class:`CheckpointUnusable` if
    the parts of other nodes do not arrive in *wait_seconds*, or what arrived is damaged, :class:`RecipeError` if
    another live run uses *run*, OSError.
    """
    record = MemoryRecord.read(run)
    # Checkpoints of a start that has failed before it trained: its nodes did not have them completely.
    bring_back(directory)
    copies = []
    on_disk = next(_complete_names(run), None)
    for name in checkpoint_names(directory):
        source = directory / str(name)
        digest, has_manifest = save_digest(source)
        if on_disk is not None and name.step <= on_disk.step:
            break
        if digest is None or record is None:
            continue
        # A node that was absent may have later steps than those that the others went back to.
        if has_manifest and not record.is_current(Summary.read(source)):
            continue
        copy = _Copy.of(run, str(name), digest, record)
        _copy_missing(source, copy)
        copies.append(copy)
        if copy.is_complete:
            break
    return _publish_first(copies, run, wait_seconds) if copies else None


def _publish_first(copies: Sequence[_Copy], run: Path, wait_seconds: float) -> Path:
    """Publish the first copy that is complete, and remove the others."""
    end = time.monotonic() + wait_seconds
    while True:
        for copy in copies:
            if copy.is_complete:
                _publish(run, copy)
                for other in copies:
                    commit.discard(other.staging)
                return copy.final
        if time.monotonic() > end:
            raise unusable(
                "parts of the newest checkpoint are in the memory of nodes that did not copy them",
                run,
                ", ".join(copy.final.name for copy in copies),
                "run the same command on the same nodes to continue from it",
            )
        time.sleep(_PAUSE_SECONDS)


def _copy_missing(source: Path, copy: _Copy) -> None:
    """Copy all files of *source* that the staging directory does not have. Each appears complete and durable there.

    After a failure, the next start removes what was copied. Raises OSError.
    """
    # Not below the directory that all nodes have in common: another one may publish that at any time.
    own = copy.staging.with_name(layout.staging_name(copy.final.name, uuid.uuid4().hex))
    own.mkdir()
    try:
        for file in files_below(source):
            target = copy.staging / file
            if copy.is_published:
                return
            if target.exists():
                continue
            temporary = own / uuid.uuid4().hex
            shutil.copyfile(source / file, temporary)
            fsync_file(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Again: another node may have copied it meanwhile, and be verifying it.
            if not target.exists():
                os.rename(temporary, target)
    except OSError:
        if not copy.is_published:
            raise
    finally:
        commit.discard(own)


def _publish(run: Path, copy: _Copy) -> None:
    """Publish a complete copy, unless another node has. Raises :class:`CheckpointUnusable` if it is damaged."""
    # Without the lease, which the others wait for: it can take minutes.
    _check(copy)
    end = time.monotonic() + _LEASE_SECONDS
    while True:
        try:
            lease = Lease(run)
            break
        except RecipeError:
            if time.monotonic() > end:
                raise
        time.sleep(_PAUSE_SECONDS)
    try:
        if copy.is_published:
            return
        fsync_directories(copy.staging)
        if os.path.lexists(copy.final):
            # It is damaged: otherwise, nothing would have been copied.
            links.set_aside(run, copy.final.name)
        commit.publish(copy.staging, copy.final.name)
        commit.point(run, layout.LATEST, copy.final.name)
    finally:
        lease.release()


def _check(copy: _Copy) -> None:
    """Raise :class:`CheckpointUnusable` if a file is not what was saved, and remove the copy then.

    The memory is freed only after the publication: until then, the next start may find the file intact on another node.
    """
    problems: Sequence[Problem]
    try:
        problems = verify(copy.staging, Manifest.read(copy.staging))
    except CheckpointUnusable as error:
        problems = error.problems
    # Another node may have published it meanwhile: then all files are missing here.
    if problems and not copy.is_published:
        commit.discard(copy.staging)
        raise unusable(
            f"{copy.final.name} was not copied to the disk, because it is damaged in memory",
            os.path.relpath(problems[0].where, copy.staging),
            problems[0].value,
            "run the same command: it continues from what is intact",
        )


def _complete_names(run: Path) -> Iterator[layout.CheckpointName]:
    """Yield the names of the checkpoints on disk with a manifest that can be read, newest first."""
    for name in checkpoint_names(run):
        with contextlib.suppress(OSError, CheckpointUnusable):
            Summary.read(run / str(name))
            yield name


def keep_on_disk(run: Path, parent: Path, *, copies: bool = True, by_rank: bool = False) -> str:
    """Copy the newest checkpoint of *run* in the memory of this node to disk, and free the memory.

    Args:
        run: The run directory.
        parent: The value of ``checkpoint.memory.directory``.
        copies: False: free the memory without a copy.
        by_rank: The caller is a rank that ends. While another rank of this node owns the memory, nothing is done: that
            one will do it.

    Raises nothing. Returns a message for the user, empty if there was nothing to copy. After a failure, the memory is
    kept for the next start.
    """
    try:
        directory = memory_of(run.absolute(), parent)
        if directory is None:
            return ""
        # A live run of this directory would own the memory, too.
        try:
            lease = Lease(directory)
        except RecipeError:
            if by_rank:
                return ""
            raise
        try:
            copy = copy_to_disk(directory, run.absolute()) if copies else None
            remove_memory(directory)
        finally:
            lease.release()
    except AutomodelError as error:
        return f"the checkpoints in memory are kept: {describe(error)[1]}"
    except OSError as error:
        what = "the checkpoint in memory could not be copied"
        return str(os_problem(error, what, hint=REPAIR, restart=RESUME))
    return "" if copy is None else f"the newest checkpoint in memory was copied to {copy}"
