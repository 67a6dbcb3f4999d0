"""Upload the files that a node other than rank 0's has of the checkpoints of a run, while it trains.

The uploading process of rank 0's node asks for them (:mod:`.parts`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.manifest import MAX_BYTES, Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote.child_process import serve
from automodel_ckpt.checkpoint.remote.parts import (
    PartAnswer,
    PartRequest,
    files_here,
    seconds_to_next_look,
)
from automodel_ckpt.checkpoint.remote.push import only, send_files
from automodel_ckpt.checkpoint.remote.uploader import LINK, LOCK, Job, StoreLoop
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.store.store import StoreError
from automodel_ckpt.checkpoint.store.transfer import UploadMemory
from automodel_ckpt.errors import CheckpointUnusable

STATUS = ".remote-part.json"


class PartUploader(StoreLoop):
    """Uploads the files in *root* that the coordinator asks for."""

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, STATUS, job)
        self._is_owner = False
        self._answered: set[str] = set()
        self._stored: set[str] = set()
        """The digests of the checkpoints here that the store has completely."""
        self._waiting_since: dict[str, float] = {}
        self._next_look: dict[str, float] = {}
        """When the store is read again for a checkpoint that it does not have, by digest."""
        self._known: dict[str, tuple[tuple[int, int, int], Manifest]] = {}
        self._answering = threading.Lock()
        self._current: tuple[str, str, int] | None = None
        """The checkpoint that is being uploaded, the attempt, and the bytes that were sent before."""

    @property
    def is_done(self) -> bool:
        """Whether the store has all checkpoints that have files on this node."""
        found = self._checkpoints()
        return all(manifest.digest in self._stored for manifest in found.values())

    def _checkpoints(self) -> dict[str, Manifest]:
        """The manifests of the checkpoints that have files on this node, by name, newest first."""
        found = {}
        for name in resume.checkpoint_names(self.root):
            # It may be removed meanwhile.
            with contextlib.suppress(OSError, CheckpointUnusable):
                found[str(name)] = self._manifest(str(name))
        return found

    def _manifest(self, name: str) -> Manifest:
        """Read the manifest of a checkpoint here, once. Raises OSError and :class:`CheckpointUnusable`."""
        path = self.root / name
        stamp = resume.stamp(path)
        if name not in self._known or self._known[name][0] != stamp:
            data = read_safely(path, layout.MANIFEST, limit=MAX_BYTES)
            # Without the tables, which are on rank 0's node.
            manifest = Manifest.parse(data, path, lambda file, start, nbytes: b"")
            self._known[name] = (stamp, manifest)
        return self._known[name][1]

    def catch_up(self) -> None:
        """Answer the requests of the coordinator. Raises what an upload raises."""
        for name, manifest in self._checkpoints().items():
            if manifest.digest in self._stored or self.stopping.is_set():
                continue
            if not self._is_due(manifest.digest):
                continue
            request = PartRequest.read(self.store, name)
            if request is None:
                self._note_if_stored(name, manifest)
            elif request.start == self.job.token and request.digest == manifest.digest:
                self._answer(name, manifest, request)

    def _is_due(self, digest: str) -> bool:
        """Whether to read the store now for the checkpoint with this *digest*. If so, the next time is set."""
        now = time.monotonic()
        if now < self._next_look.get(digest, now):
            return False
        waited = now - self._waiting_since.setdefault(digest, now)
        self._next_look[digest] = now + seconds_to_next_look(waited)
        return True

    def _note_if_stored(self, name: str, manifest: Manifest) -> None:
        """Without a request, the checkpoint is complete in the store, or its upload has not begun."""
        place = f"{name}/{layout.MANIFEST}"
        here = read_safely(self.root / name, layout.MANIFEST, limit=MAX_BYTES)
        try:
            # It takes megabytes.
            is_stored = self.store.size(place) == len(here) and self.store.read(place) == here
        except FileNotFoundError:
            return
        if is_stored:
            self._stored.add(manifest.digest)
            self._memory(name, manifest).forget()

    def _memory(self, name: str, manifest: Manifest) -> UploadMemory:
        path = self.root / f"{LINK}{name}.json"
        return UploadMemory.read(path, manifest.digest, str(self.store))

    def _answer(self, name: str, manifest: Manifest, request: PartRequest) -> None:
        if request.attempt in self._answered:
            return
        if not self._is_owner:
            # The coordinator has taken over the URL before its first request.
            self.run_in_store.continue_ownership()
            self._is_owner = True
        before = self.sent_bytes
        self._current = (name, request.attempt, before)
        files: Sequence[str] = ()
        failure = ""
        try:
            files = self._upload(name, manifest, request)
        except CheckpointUnusable as error:
            # Repeating cannot help: the files are damaged.
            failure = str(error)
        finally:
            # From here on, note_progress() does not replace the answer.
            with self._answering:
                self._current = None
        sent_bytes = self.sent_bytes - before
        answer = PartAnswer(request.attempt, sent_bytes, True, tuple(files), failure)
        answer.write(self.store, name, self.job.node)
        self._answered.add(request.attempt)
        # The wait for the other nodes begins.
        self._waiting_since.pop(manifest.digest, None)

    def _upload(self, name: str, manifest: Manifest, request: PartRequest) -> list[str]:
        """Upload the files that this node has and the coordinator has not; return their names."""
        path = self.root / name
        here = files_here(manifest, path)
        mine = only(manifest, {file: here[file] for file in here.keys() - set(request.files)})
        problems = verify(path, mine, "digest")
        if problems:
            raise CheckpointUnusable.all_of(problems)
        memory = self._memory(name, manifest)
        arrived = self.store.sizes(name)
        # An earlier attempt may have been removed from the store.
        memory.done = {
            file for file, record in mine.files.items() if arrived.get(file) == record.size
        } & memory.done
        send_files(self.run_in_store, path, mine, memory, self.throttle, self.job.num_threads)
        return sorted(mine.files)

    def note_progress(self) -> None:
        """Tell the coordinator the bytes that were sent, so that it waits for the rest."""
        with self._answering:
            if self._current is None or self.sent_bytes == self.status.sent_bytes:
                return
            self.note()
            name, attempt, before = self._current
            answer = PartAnswer(attempt, self.sent_bytes - before)
            # The next one counts them, too.
            with contextlib.suppress(StoreError):
                answer.write(self.store, name, self.job.node)


def main(arguments: list[str]) -> int:
    """Upload until some time after the trainer has ended, or until all is in the store then."""
    root = Path(arguments[0])
    return serve(root, LOCK, lambda job: PartUploader(root, Job(**job)))
