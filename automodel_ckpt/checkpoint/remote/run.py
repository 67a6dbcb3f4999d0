"""The objects of a run in a store, and the protocol that makes a checkpoint there complete or absent.

``URL/epoch_E_step_S/`` has the files of a checkpoint under their names. Its ``MANIFEST.json`` is written last and
deleted first, so a checkpoint with a manifest is complete. ``LATEST`` and ``LOWEST_VAL`` are objects with the name of a
checkpoint; they are written after its manifest, and a checkpoint that one of them names is not removed. An object
``SUPERSEDED`` in a checkpoint marks that its run went back to an earlier step; it is never loaded automatically.
``run.json`` names the start of a run that writes here: a later start replaces it, and the earlier one then stops
writing.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from automodel_ckpt.checkpoint import layout, policy
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.manifest import Summary
from automodel_ckpt.checkpoint.remote.multipart import abort_uploads
from automodel_ckpt.checkpoint.remote.store import Store
from automodel_ckpt.errors import CheckpointUnusable, LeaseLost

SUPERSEDED = "SUPERSEDED"
OWNER = "run.json"
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
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

    # ---------------------------------------------------------------- the owner

    def take_over(self) -> None:
        """Become the only writer: from here on, an earlier start of a run that writes here stops."""
        self._is_owner = True
        owner = {"start": self.token, "host": socket.gethostname(), "time": time.time()}
        self.store.write(OWNER, json.dumps(owner).encode())

    def check_owner(self) -> None:
        """Raise :class:`LeaseLost` if a later start took over. Called before each change that others can see."""
        if not self._is_owner:
            return
        try:
            owner = parse_json(self.store.read(OWNER))
        except (FileNotFoundError, ValueError):
            owner = None
        if not isinstance(owner, dict) or owner.get("start") != self.token:
            host = owner.get("host") if isinstance(owner, dict) else None
            raise LeaseLost(
                "another run writes its checkpoints to this URL now",
                where=str(self.store),
                value=f"a run on {host}" if host else f"no valid {OWNER}",
                hint="give each run its own URL",
            )

    # ---------------------------------------------------------------- reading

    def names(self) -> list[layout.CheckpointName]:
        """List the names of checkpoints that have objects, newest first. They may be incomplete."""
        found = [layout.parse_checkpoint_name(name) for name in self.store.directories()]
        # The listing may be behind the objects; the pointers are not.
        for pointer in layout.POINTERS:
            target = self.pointed(pointer)
            found.append(layout.parse_checkpoint_name(target) if target else None)
        return sorted({name for name in found if name is not None}, reverse=True)

    def manifest(self, name: str) -> bytes | None:
        """Read the manifest of a checkpoint; None if it is absent or incomplete."""
        try:
            return self.store.read(f"{name}/{layout.MANIFEST}")
        except FileNotFoundError:
            return None

    def checkpoint(self, name: layout.CheckpointName) -> RemoteCheckpoint | None:
        """Read the summary of a checkpoint; None if it is absent, incomplete, damaged or superseded."""
        if self.is_superseded(str(name)):
            return None
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
        """Return the newest complete checkpoint; None if there is none."""
        return next(self.checkpoints(), None)

    def pointed(self, pointer: str) -> str | None:
        """Return the name of the checkpoint that a pointer names; None without a valid pointer."""
        try:
            text = self.store.read(pointer)[:_NAME_BYTES].decode("ascii", "replace").strip()
        except FileNotFoundError:
            return None
        return text if layout.parse_checkpoint_name(text) else None

    def is_superseded(self, name: str) -> bool:
        """Whether the run went back to a step before this checkpoint."""
        try:
            self.store.size(f"{name}/{SUPERSEDED}")
        except FileNotFoundError:
            return False
        return True

    # ---------------------------------------------------------------- writing

    def publish(self, name: str, manifest: bytes) -> None:
        """Complete a checkpoint whose files are all in the store. Raises :class:`LeaseLost`."""
        self.check_owner()
        self._known.pop(name, None)
        self.store.write(f"{name}/{layout.MANIFEST}", manifest)

    def point(self, metric_key: str, mode: policy.Mode) -> None:
        """Write LOWEST_VAL, then LATEST, from the complete checkpoints. Raises :class:`LeaseLost`."""
        found = list(self.checkpoints())
        records = [_record(each, metric_key) for each in found]
        best = policy.best(records, mode)
        targets = {
            layout.LOWEST_VAL: best.name if best else None,
            layout.LATEST: records[0].name if records else None,
        }
        for pointer, target in targets.items():
            before = self.pointed(pointer)
            if target == before:
                continue
            self.check_owner()
            if target is None:
                self.store.delete([pointer])
            else:
                self.store.write(pointer, f"{target}\n".encode())

    def supersede_after(self, step: int, metric_key: str, mode: policy.Mode) -> list[str]:
        """Mark the checkpoints after *step*, to which the run went back, and return the names of those newly marked."""
        marked = []
        later = [str(name) for name in self.names() if name.step > step]
        for name in later:
            if self.is_superseded(name):
                continue
            self.check_owner()
            text = f"the run went back to step {step}\n"
            self.store.write(f"{name}/{SUPERSEDED}", text.encode())
            marked.append(name)
        if later:
            # Also if an earlier start marked them: a kill may have left a pointer to one.
            self.point(metric_key, mode)
        return marked

    def withdraw(self, name: str) -> None:
        """Remove a checkpoint that no pointer names: its manifest first, then all its objects.

        It is marked before as one that is never loaded, so that :meth:`prune` completes an interrupted removal. Raises
        ValueError if a pointer names it, and :class:`LeaseLost`.
        """
        if name in [self.pointed(pointer) for pointer in layout.POINTERS]:
            raise ValueError(f"{name} is referenced")
        self.check_owner()
        self._known.pop(name, None)
        self.store.write(f"{name}/{SUPERSEDED}", b"being removed\n")
        self.store.delete([f"{name}/{layout.MANIFEST}"])
        abort_uploads(self.store, name)
        files = self.store.sizes(name)
        # The marker last: a kill between must not make the rest look like another upload in progress.
        self.store.delete(f"{name}/{file}" for file in files if file != SUPERSEDED)
        self.store.delete([f"{name}/{SUPERSEDED}"])
        self.store.delete_directory(name)

    def removable(self, keep: policy.KeepPolicy, metric_key: str) -> list[str]:
        """List the complete checkpoints that *keep* does not keep and no pointer names."""
        if keep.last is None:
            return []
        records = [_record(each, metric_key) for each in self.checkpoints()]
        protected = set()
        for pointer in layout.POINTERS:
            target = self.pointed(pointer)
            if target is not None:
                protected.add(target)
        return [record.name for record in keep.removable(records, protected)]

    def superseded(self) -> list[str]:
        """List the superseded checkpoints, newest first."""
        return [str(name) for name in self.names() if self.is_superseded(str(name))]

    def prune(self, keep: policy.KeepPolicy, metric_key: str) -> list[str]:
        """Remove the checkpoints that *keep* does not keep, and return their names."""
        removable = self.removable(keep, metric_key)
        for name in self.superseded():
            if self.manifest(name) is None:
                # Its removal was interrupted.
                removable.append(name)
        for name in removable:
            self.withdraw(name)
        return removable


def _record(checkpoint: RemoteCheckpoint, metric_key: str) -> policy.Record:
    summary = checkpoint.summary
    metric = policy.metric_of(summary.losses, metric_key) if summary.validated else None
    name = checkpoint.name
    return policy.Record(str(name), name.step, name.epoch, metric)
