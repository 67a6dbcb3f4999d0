"""Upload the files that a node other than rank 0's has of the checkpoints of a run, while it trains.

The uploading process of rank 0's node asks for them (:mod:`.parts`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.commit import stamp
from automodel_ckpt.checkpoint.parts.manifest import MAX_BYTES, Manifest, Summary
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote import parts
from automodel_ckpt.checkpoint.remote.background import LINK, LOCK, PART_STATUS
from automodel_ckpt.checkpoint.remote.child_process import serve
from automodel_ckpt.checkpoint.remote.parts import PartAnswer, PartRequest, files_here, only
from automodel_ckpt.checkpoint.remote.push import send_files
from automodel_ckpt.checkpoint.remote.uploader import Job, StoreLoop
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.store.store import StoreError
from automodel_ckpt.checkpoint.store.transfer import UploadMemory
from automodel_ckpt.errors import CheckpointUnusable


class PartUploader(StoreLoop):
    """Uploads the files in *root* that the coordinator asks for."""

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, PART_STATUS, job)
        self._is_owner = False
        self._answered: set[str] = set()
        self._stored: set[str] = set()
        """The digests of the checkpoints here that the store has completely."""
        self._next_look = 0.0
        self._digests: dict[tuple[int, int, int], str] = {}
        self._answering = threading.Lock()
        self._current: tuple[str, str, int] | None = None
        """The checkpoint that is being uploaded, the attempt, and the bytes that were sent before."""

    @property
    def is_done(self) -> bool:
        """Whether the store has all checkpoints that have files on this node."""
        return all(digest in self._stored for _, digest in self._checkpoints())

    def _checkpoints(self) -> Iterator[tuple[str, str]]:
        """Yield the checkpoints that have files on this node, newest first: the name, and the manifest's digest."""
        for name in resume.checkpoint_names(self.root):
            # It may be removed meanwhile.
            with contextlib.suppress(OSError, CheckpointUnusable):
                path = self.root / str(name)
                current = stamp(path)
                if current not in self._digests:
                    self._digests[current] = Summary.read(path).digest
                yield str(name), self._digests[current]

    def catch_up(self) -> None:
        """Answer the requests of the coordinator. Raises what an upload raises."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + parts.LOOK_SECONDS
        for name, digest in self._checkpoints():
            if digest in self._stored or self.stopping.is_set():
                continue
            request = PartRequest.read(self.store, name)
            if request is None:
                self._note_if_stored(name, digest)
            elif request.start == self.job.token and request.digest == digest:
                self._answer(name, request)

    def _note_if_stored(self, name: str, digest: str) -> None:
        """Without a request, the checkpoint is complete in the store, or its upload has not begun."""
        here = read_safely(self.root / name, layout.MANIFEST, limit=MAX_BYTES)
        if self.run_in_store.manifest(name) == here:
            self._stored.add(digest)
            self._memory(name, digest).forget()

    def _memory(self, name: str, digest: str) -> UploadMemory:
        return UploadMemory.read(self.root / f"{LINK}{name}.json", digest, str(self.store))

    def _answer(self, name: str, request: PartRequest) -> None:
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
            files = self._upload(name, request)
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

    def _upload(self, name: str, request: PartRequest) -> list[str]:
        """Upload the files that this node has and the coordinator has not; return their names."""
        path = self.root / name
        data = read_safely(path, layout.MANIFEST, limit=MAX_BYTES)
        # Without the tables, which are on rank 0's node.
        manifest = Manifest.parse(data, path, lambda file, start, nbytes: b"")
        here = files_here(manifest, path)
        mine = only(manifest, {file: here[file] for file in here.keys() - set(request.files)})
        CheckpointUnusable.check(verify(path, mine, "digest"))
        memory = self._memory(name, request.digest)
        arrived = self.store.sizes(name)
        # An earlier attempt may have been removed from the store.
        memory.done &= {
            file for file, record in mine.files.items() if arrived.get(file) == record.size
        }
        send_files(self.run_in_store, path, mine, memory, self.throttle, self.job.num_threads)
        return sorted(mine.files)

    def note_progress(self) -> None:
        """Report the bytes that were sent to the coordinator, so that it waits for the rest."""
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
