"""The upload of a checkpoint with files on several nodes: each node uploads its own.

The coordinator, the uploading process of rank 0's node, writes an object ``NAME/.parts/request.json`` in the store. The
processes of the other nodes answer it with ``NAME/.parts/node_N.json`` when their files have arrived. When all files
have, the coordinator writes the checkpoint's manifest, and removes these objects. An answer counts for one attempt of
the coordinator only: whatever is killed and started again, each manifest follows a complete upload.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import CheckpointUnusable, unusable

LOOK_SECONDS = 2.0
"""How often a node reads the store while it waits for another one. Requests cost money."""
_REQUEST = "request.json"

Record = TypeVar("Record", "PartRequest", "PartAnswer")


@dataclass(frozen=True)
class PartRequest:
    """What the coordinator asks of the other nodes: to upload their files of the checkpoint with the manifest *digest*.

    *start* is the token of the run's start, *attempt* the name of this attempt, and *files* what the coordinator itself
    uploads.
    """

    start: str
    attempt: str
    digest: str
    files: list[str]

    @classmethod
    def read(cls, store: Store, name: str) -> PartRequest | None:
        """Read the request for the checkpoint *name*. Returns None when there is none. Raises :class:`StoreError`."""
        return _read(cls, store, _place(name, _REQUEST))


@dataclass(frozen=True)
class PartAnswer:
    """How far a node is: the *files* that have arrived at the end of the *attempt*, and its *sent_bytes* so far.

    *error* is the reason why it cannot upload the rest; another attempt cannot help then.
    """

    attempt: str
    sent_bytes: int = 0
    is_done: bool = False
    files: tuple[str, ...] = ()
    error: str = ""

    def write(self, store: Store, name: str, node: int) -> None:
        """Answer as the node *node*. Raises :class:`StoreError`."""
        store.write(_place(name, _answer_of(node)), json.dumps(asdict(self)).encode())


@dataclass(slots=True)
class OtherNodes:
    """The nodes other than the coordinator's, as the coordinator sees them: their numbers are 1 to *num_nodes* - 1.

    *start* is the token of the run's start. :meth:`wait` ends when *stopping* is set.
    """

    num_nodes: int
    start: str
    stopping: threading.Event
    on_progress: Callable[[int], None]
    """Called with the bytes that the other nodes have sent of the checkpoint."""
    _attempt: str = ""

    def request(self, store: Store, name: str, digest: str, files: Collection[str]) -> None:
        """Ask the other nodes for the files of the checkpoint *name* that are not among *files*."""
        self._attempt = uuid.uuid4().hex
        request = PartRequest(self.start, self._attempt, digest, sorted(files))
        store.write(_place(name, _REQUEST), json.dumps(asdict(request)).encode())

    def wait(self, store: Store, checkpoint: Path, missing: Collection[str]) -> None:
        """Wait until the files *missing* of *checkpoint* have arrived.

        Raises :class:`CheckpointUnusable` if no node has one of them intact, or the checkpoint is removed meanwhile,
        InterruptedError when the process is stopped, and :class:`StoreError`.
        """
        while absent := set(missing) - self._arrived(store, checkpoint.name, missing):
            if not checkpoint.is_dir():
                raise _unusable(checkpoint, "it was removed before it was uploaded")
            if self.stopping.wait(LOOK_SECONDS):
                raise InterruptedError(f"the upload was stopped: {len(absent)} files are missing")

    def _arrived(self, store: Store, name: str, missing: Collection[str]) -> set[str]:
        """The files that the other nodes have uploaded in this attempt."""
        arrived: set[str] = set()
        answers = []
        for node in range(1, self.num_nodes):
            answer = _read(PartAnswer, store, _place(name, _answer_of(node)))
            if answer is not None and answer.attempt == self._attempt:
                answers.append(answer)
                arrived.update(answer.files)
        self.on_progress(sum(answer.sent_bytes for answer in answers))
        # Not before: the files of a node that is still uploading could not be removed.
        is_final = len(answers) == self.num_nodes - 1 and all(each.is_done for each in answers)
        absent = sorted(set(missing) - arrived)
        if is_final and absent:
            errors = [answer.error for answer in answers if answer.error]
            value = errors[0] if errors else f"no node has {absent[0]}"
            raise _unusable(Path(name), value)
        return arrived

    def remove(self, store: Store, name: str) -> None:
        """Remove the request and the answers."""
        store.delete([_place(name, _answer_of(node)) for node in range(1, self.num_nodes)])
        store.delete([_place(name, _REQUEST)])
        store.delete_directory(f"{name}/{layout.PARTS}")


def files_here(manifest: Manifest, checkpoint: Path) -> Mapping[str, FileRecord]:
    """The records of the files in *manifest* that the directory *checkpoint* has, with their sizes."""
    found = {}
    for file, record in manifest.files.items():
        path = checkpoint / file
        if path.is_file() and path.stat().st_size == record.size:
            found[file] = record
    return found


def only(manifest: Manifest, files: Mapping[str, FileRecord]) -> Manifest:
    """Restrict *manifest* to some *files*, which are then verified as a whole."""
    return replace(manifest, files=dict(files), trees={}, state={})


def _place(name: str, file: str) -> str:
    return f"{name}/{layout.PARTS}/{file}"


def _answer_of(node: int) -> str:
    return f"node_{node}.json"


def _read(kind: type[Record], store: Store, place: str) -> Record | None:
    try:
        return kind(**parse_json(store.read(place)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _unusable(checkpoint: Path, value: str) -> CheckpointUnusable:
    return unusable(
        "the nodes do not have all files of a checkpoint",
        checkpoint.name,
        value,
        "the checkpoints before it are in the store",
    )
