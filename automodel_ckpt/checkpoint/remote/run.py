"""The objects of a run in a store, and the protocol that makes a checkpoint there complete or absent.

``URL/epoch_E_step_S/`` has the files of a checkpoint under their names. Its ``MANIFEST.json`` is written last and
deleted first, so a checkpoint with a manifest is complete. ``LATEST`` and ``LOWEST_VAL`` are objects with the name of a
checkpoint, and in a second line the start that wrote them; they are written after its manifest, and a checkpoint that
one of them names is not removed. An object ``SUPERSEDED`` in a checkpoint marks that its run went back to an earlier
step; it is never loaded automatically. ``run.json`` names the start of a run that writes here: a later start replaces
it, and the earlier one then stops writing.

Changes are conditional (:mod:`.conditional`). Versions are read before what the change depends on, and the owner is
read after them: a request of a start that was overtaken names a version that the later start has replaced.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict
from automodel_ckpt.checkpoint.options import Mode
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Summary
from automodel_ckpt.checkpoint.run.resume import Record, best_record, metric_of
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from automodel_ckpt.checkpoint.store.transfer import abort_uploads
from automodel_ckpt.errors import CheckpointUnusable, LeaseLost, unusable

SUPERSEDED = "SUPERSEDED"
OWNER = "run.json"
_NAME_BYTES = 256
_POINTERS = (layout.LOWEST_VAL, layout.LATEST)
_MAX_CONFLICTS = 20
_OWN_URL = "give each run its own URL"
REMOVING = b"being removed\n"
"""The content of :data:`SUPERSEDED` in a checkpoint that is being removed."""
_NO_VERSION = "1"
"""A version that no object has: ETags are longer, and generations are times in microseconds."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A complete checkpoint in a store: its name, and the summary of its manifest."""

    name: layout.CheckpointName
    summary: Summary


class RemoteRun:
    """The checkpoints of a run in *store*. Its methods raise :class:`StoreError` where the store fails."""

    def __init__(self, store: Store, *, token: str | None = None) -> None:
        """*token* names the start of a run that may become the owner of the URL; by default a new one."""
        self.store = store
        self.token = token or uuid.uuid4().hex
        self._is_owner = False
        self._known: dict[str, RemoteCheckpoint] = {}
        self._published: set[str] = set()

    # ---------------------------------------------------------------- the owner

    def take_over(self) -> bool:
        """Become the only writer: from here on, an earlier start of a run that writes here stops.

        Return whether the store supports conditional writes. Raises :class:`LeaseLost` if another start takes over at
        the same time.
        """
        owner = {"start": self.token, "host": socket.gethostname(), "time": time.time()}
        data = json.dumps(owner).encode()
        version = self.store.version(OWNER)
        is_written = self.store.replace(OWNER, data, version)
        if not is_written and self.store.version(OWNER) == version:
            raise conflict(self.store, OWNER)
        self._is_owner = True
        if not is_written:
            # By another start; or by an attempt of this one, if its reply was lost.
            self.check_owner()
        if self.store.is_conditional and self.store.replace(OWNER, data, _NO_VERSION):
            # It has written although the version is another one.
            self.store.ignore_conditions()
        return self.store.is_conditional

    def continue_ownership(self) -> None:
        """Write as the owner that an earlier process with this token became. Raises :class:`LeaseLost`."""
        self._is_owner = True
        self.check_owner()

    def check_owner(self) -> None:
        """Raise :class:`LeaseLost` if a later start took over. Called before each change that others can see."""
        if not self._is_owner:
            return
        owner = self.owner()
        if owner is None or owner.get("start") != self.token:
            host = owner.get("host") if owner is not None else None
            raise LeaseLost(
                "another run writes its checkpoints to this URL now",
                where=self.store,
                value=f"a run on {host}" if host else f"no valid {OWNER}",
                hint=_OWN_URL,
            )

    def owner(self) -> ValueDict | None:
        """Read the start that writes here: ``start``, ``host`` and ``time``. Returns None when there is none."""
        try:
            owner = parse_json(self.store.read(OWNER))
        except (FileNotFoundError, ValueError):
            return None
        return owner if isinstance(owner, dict) else None

    def was_written(self) -> bool:
        """Whether a run of this program has written here. Other programs have directories of the same names."""
        return self.owner() is not None or any(map(self.pointed, layout.POINTERS))

    # ---------------------------------------------------------------- reading

    def names(self) -> list[layout.CheckpointName]:
        """List the names of checkpoints that have objects, newest first. They may be incomplete."""
        found = [layout.parse_checkpoint_name(name) for name in self.store.directories()]
        # The listing may be behind the objects; the pointers, and what was published here, are not.
        found += [layout.parse_checkpoint_name(name) for name in self._published]
        for pointer in layout.POINTERS:
            target = self.pointed(pointer)
            found.append(layout.parse_checkpoint_name(target) if target else None)
        return sorted({name for name in found if name is not None}, reverse=True)

    def manifest(self, name: str) -> bytes | None:
        """Read the manifest of a checkpoint. Returns None when it is absent or incomplete."""
        try:
            return self.store.read(f"{name}/{layout.MANIFEST}")
        except FileNotFoundError:
            return None

    def complete_manifest(self, name: str) -> tuple[bytes, Manifest]:
        """Read the manifest of a checkpoint, and parse it; its slice tables are then read from the store.

        Raises :class:`CheckpointUnusable` if it is absent or damaged.
        """
        data = self.manifest(name)
        if data is None:
            raise unusable(
                "the store has no complete checkpoint of this name",
                self.store,
                name,
                "`ckpt ls URL` lists the checkpoints",
            )

        def read(file: str, start: int, nbytes: int) -> bytes:
            return self.store.read_patiently(f"{name}/{file}", start, start + nbytes)

        return data, Manifest.parse(data, f"{self.store}/{name}/{layout.MANIFEST}", read)

    def checkpoint(self, name: layout.CheckpointName) -> RemoteCheckpoint | None:
        """Read the summary of a checkpoint. Returns None when it is absent, incomplete, damaged or superseded."""
        return None if self.is_superseded(str(name)) else self.complete(name)

    def complete(self, name: layout.CheckpointName) -> RemoteCheckpoint | None:
        """Read the summary of a checkpoint. Returns None when it is absent, incomplete or damaged."""
        known = self._known.get(str(name))
        if known is not None:
            return known
        data = self.manifest(str(name))
        if data is None:
            return None
        try:
            summary = Summary.parse(data, f"{self.store}/{name}/{layout.MANIFEST}")
        except CheckpointUnusable:
            return None
        return self._known.setdefault(str(name), RemoteCheckpoint(name, summary))

    def checkpoints(self) -> Iterator[RemoteCheckpoint]:
        """Yield the complete checkpoints that are not superseded, newest first."""
        for name in self.names():
            found = self.checkpoint(name)
            if found is not None:
                yield found

    def newest(self) -> RemoteCheckpoint | None:
        """Return the newest complete checkpoint, or None when there is none."""
        return next(self.checkpoints(), None)

    def pointed(self, pointer: str) -> str | None:
        """Return the name of the checkpoint that a pointer names; None without a valid pointer."""
        try:
            text = self.store.read(pointer)[:_NAME_BYTES].decode("ascii", "replace")
        except FileNotFoundError:
            return None
        target = text.partition("\n")[0].strip()
        return target if layout.parse_checkpoint_name(target) else None

    def is_superseded(self, name: str) -> bool:
        """Whether the run went back to a step before this checkpoint."""
        return self.store.version(f"{name}/{SUPERSEDED}") is not None

    # ---------------------------------------------------------------- writing

    def publish(self, name: str, manifest: bytes) -> None:
        """Complete a checkpoint that has all its files in the store.

        Raises :class:`LeaseLost`, and :class:`CheckpointUnusable` if another writer published one of this name.
        """
        self.check_owner()
        self._known.pop(name, None)
        self._published.add(name)
        if self.store.create(f"{name}/{layout.MANIFEST}", manifest):
            return
        found = self.manifest(name)
        if found is None:
            raise conflict(self.store, f"{name}/{layout.MANIFEST}")
        # An earlier attempt may have written it.
        if found != manifest:
            raise unusable(
                "another writer published a checkpoint of this name",
                f"{self.store}/{name}",
                "",
                _OWN_URL,
            )

    def point(self, metric_key: str, mode: Mode) -> None:
        """Write LOWEST_VAL, then LATEST, from the complete checkpoints. Raises :class:`LeaseLost`.

        The owner also writes pointers that are right already, once: a request of an earlier start then comes too late.
        """
        for _ in range(_MAX_CONFLICTS):
            versions = {pointer: self.store.version(pointer) for pointer in _POINTERS}
            targets = self._targets(metric_key, mode)
            if all(self._set(each, targets[each], versions[each]) for each in _POINTERS):
                return
        raise conflict(self.store, layout.LATEST)

    def _targets(self, metric_key: str, mode: Mode) -> dict[str, str | None]:
        records = [record_of(each, metric_key) for each in self.checkpoints()]
        best = best_record(records, mode)
        return {
            layout.LOWEST_VAL: best.name if best else None,
            layout.LATEST: records[0].name if records else None,
        }

    def _set(self, pointer: str, target: str | None, version: str | None) -> bool:
        """Set a pointer if it still has *version*. Return whether it is set, and its target is not being removed."""
        if target is None:
            self.check_owner()
            return version is None or self.store.delete_version(pointer, version)
        data = f"{target}\n{self.token}\n".encode()
        if version is not None:
            try:
                found = self.store.read(pointer)
            except FileNotFoundError:
                return False
            is_set = found == data or (not self._is_owner and self.pointed(pointer) == target)
            if is_set:
                return True
        self.check_owner()
        # A removal marks a checkpoint, and then reads the pointers: one of the two sees the other.
        return self.store.replace(pointer, data, version) and not self.is_superseded(target)

    def supersede(self, names: Iterable[str], metric_key: str, mode: Mode) -> list[str]:
        """Mark checkpoints that the run has left, and set the pointers to others. Return those newly marked."""
        marked = []
        for name in names:
            if self.is_superseded(name):
                continue
            self.check_owner()
            self.store.write(f"{name}/{SUPERSEDED}", b"superseded\n")
            marked.append(name)
        # Also if an earlier start marked them: a kill may have left a pointer to one.
        self.point(metric_key, mode)
        return marked

    def withdraw(self, name: str) -> None:
        """Remove a checkpoint that no pointer names: its manifest first, then all its objects.

        It is marked before as one that is never loaded, so that :meth:`prune` completes an interrupted removal. Raises
        ValueError if a pointer names it, and :class:`LeaseLost`.
        """
        if self._is_referenced(name):
            raise ValueError(f"{name} is referenced")
        self._known.pop(name, None)
        self._published.discard(name)
        manifest = f"{name}/{layout.MANIFEST}"
        versions = self._versions(name)
        self.check_owner()
        is_marked = self.store.create(f"{name}/{SUPERSEDED}", REMOVING)
        if self._is_referenced(name):
            # A pointer was written at the same time.
            if is_marked:
                self.store.delete([f"{name}/{SUPERSEDED}"])
            raise ValueError(f"{name} is referenced")
        self._remove(manifest, versions.pop(manifest, None))
        abort_uploads(self.store, name)
        # The marker last: a kill between must not make the rest look like another upload in progress.
        versions.pop(f"{name}/{SUPERSEDED}", None)
        for file, version in versions.items():
            self._remove(file, version)
        self.store.delete([f"{name}/{SUPERSEDED}"])
        self.store.delete_directory(name)

    def _versions(self, name: str) -> TextDict:
        """Return the versions of all objects of a checkpoint. The listing may be behind, the manifest is not."""
        versions: TextDict = self.store.versions(name)
        files = [layout.MANIFEST]
        with contextlib.suppress(CheckpointUnusable):
            files += self.complete_manifest(name)[1].files
        for file in files:
            path = f"{name}/{file}"
            version = None if path in versions else self.store.version(path)
            if version is not None:
                versions[path] = version
        return versions

    def _is_referenced(self, name: str) -> bool:
        return name in map(self.pointed, layout.POINTERS)

    def _remove(self, name: str, version: str | None) -> None:
        """Delete an object unless a later start wrote it anew. Raises :class:`LeaseLost`."""
        # ETags of S3 depend on the content only: a later start may have written the same.
        self.check_owner()
        if version is not None:
            self.store.delete_version(name, version)


def conflict(store: Store, name: str) -> StoreError:
    """Return the error for an object that another writer changes at the same time."""
    return StoreError(
        "an object is being changed by another writer; it is tried again",
        where=f"{store}/{name}",
        value="",
        hint=_OWN_URL,
    )


def record_of(checkpoint: RemoteCheckpoint, metric_key: str) -> Record:
    """Return the record of a checkpoint for the keep policy."""
    summary = checkpoint.summary
    metric = metric_of(summary.losses, metric_key) if summary.validated else None
    name = checkpoint.name
    return Record(str(name), name.step, name.epoch, metric)
