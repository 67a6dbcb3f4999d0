"""Upload the checkpoints of a run while it trains.

What has to be uploaded are the checkpoints with a link ``.upload-NAME`` in the run directory.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from automodel_ckpt.checkpoint.export.export_manifest import complete_exports
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.remote.background import LINK, LOCK, STATUS
from automodel_ckpt.checkpoint.remote.child_process import UploadLoop, print_line, serve
from automodel_ckpt.checkpoint.remote.parts import OtherNodes
from automodel_ckpt.checkpoint.remote.pull import LOGS
from automodel_ckpt.checkpoint.remote.push import push_checkpoint, push_exports
from automodel_ckpt.checkpoint.remote.retention import prune
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run import notes, resume
from automodel_ckpt.checkpoint.run.links import link, pending, unlink
from automodel_ckpt.checkpoint.run.resume import KeepPolicy, Record, best_record, newest_first
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import CheckpointUnusable


@dataclass(frozen=True)
class Job:
    """What to upload where. *token* names the start of the run.

    *keep* has the fields of the store's keep policy, and *went_back_to* is the step that the run resumed from; later
    checkpoints are superseded. With several nodes, each has a part of the files of each checkpoint, and uploads it;
    *node* is the number of this one.
    """

    url: str
    options: Values
    token: str
    metric_key: str = ""
    keep: Values = field(default_factory=dict)
    bytes_per_second: float | None = None
    num_threads: int = 8
    went_back_to: int = 0
    num_nodes: int = 1
    node: int = 0


class StoreLoop(UploadLoop):
    """Uploads what *job* describes of the run in *root* to a store."""

    def __init__(self, root: Path, status_file: str, job: Job) -> None:
        super().__init__(root, LINK, status_file)
        self.job = job
        self.store = Store(job.url, job.options, where="checkpoint.remote")
        self.run_in_store = RemoteRun(self.store, token=job.token)
        self.throttle = Throttle(job.bytes_per_second)
        self.note(error="", failures=0, is_over=False)

    @property
    def sent_bytes(self) -> int:
        """The bytes that were sent."""
        return self.throttle.nbytes

    @property
    def total_bytes(self) -> int:
        """The bytes that were sent when the upload in progress is complete."""
        return self.throttle.total_bytes

    def stop(self) -> None:
        """Make :meth:`run` return after the request in progress, however much is pending."""
        super().stop()
        self.throttle.stop()


class Uploader(StoreLoop):
    """Uploads the pending checkpoints of the run in *root*, on the node of rank 0."""

    def __init__(self, root: Path, job: Job) -> None:
        self._sent_by_others = 0
        super().__init__(root, STATUS, job)
        keep = {**job.keep, "steps": frozenset(job.keep.get("steps", ()))}
        self._keep = KeepPolicy(**keep)
        self._has_begun = False
        self._stored: dict[str, Record] = {}
        """The checkpoints that this process has uploaded, by name."""

    @property
    def sent_bytes(self) -> int:
        """The bytes that were sent, also by the other nodes."""
        return super().sent_bytes + self._sent_by_others

    def catch_up(self) -> None:
        """Upload all pending checkpoints. Raises what an upload raises."""
        if not self._has_begun:
            self._become_owner()
            step = self.job.went_back_to
            self._supersede([str(name) for name in self.run_in_store.names() if name.step > step])
            notes.forget_gone_back(self.root)
            self._has_begun = True
        while (names := self._worth_uploading()) and not self.stopping.is_set():
            self._upload(names[0])

    def _become_owner(self) -> None:
        """Take over the URL, once: a repetition would take it back from a run that started meanwhile."""
        token = self.job.token
        if self.status.owner == token:
            # Also in an earlier process of this start, which ended unexpectedly.
            self.run_in_store.continue_ownership()
            return
        if not self.run_in_store.take_over():
            print_line(
                f"{self.store} has no conditional writes: two runs with this URL could overwrite each other's objects"
            )
        self.note(owner=token)

    def _worth_uploading(self) -> list[str]:
        """The pending checkpoints, newest first, without those that the keep policy of the store would remove.

        There are none if a later start of the run has a process: some may be of that start, which would find in the
        store what it has not uploaded, and mark it as superseded.
        """
        names = pending(self.root, LINK)
        # After the links were read: those that were there before the later start are not of it.
        if not self.is_newest():
            self.stop()
            return []
        if self._keep.last is None:
            return names
        records = dict(self._stored)
        records.update(self._records(names))
        # The pointers of the store will name them.
        pointed = {record.name for record in newest_first(records.values())[:1]}
        best = best_record(records.values(), self._keep.mode)
        if best is not None:
            pointed.add(best.name)
        not_kept = {each.name for each in self._keep.removable(list(records.values()), pointed)}
        for name in not_kept.intersection(names):
            if (self.root / f"{LINK}{name}.json").exists():
                # What an interrupted upload has sent. Pointers name it if only its link was left.
                with contextlib.suppress(ValueError):
                    self.run_in_store.withdraw(name)
            unlink(self.root, LINK, name)
        return [name for name in names if name not in not_kept]

    def _records(self, names: list[str]) -> dict[str, Record]:
        found = (resume.record(self.root, name, self.job.metric_key, {}) for name in names)
        return {record.name: record for record in found if record is not None}

    def _supersede(self, names: list[str]) -> None:
        """Give up checkpoints of the store that the run has left, and the pointers to them."""
        metric_key, mode = self.job.metric_key, self._keep.mode
        for name in self.run_in_store.supersede(names, metric_key, mode):
            print_line(f"marked {self.store}/{name} as superseded")

    def _other_nodes(self) -> OtherNodes | None:
        """The nodes that upload their parts of a checkpoint. Returns None when this one has all files."""
        if self.job.num_nodes == 1:
            return None
        before = self._sent_by_others

        def note(sent_bytes: int) -> None:
            self._sent_by_others = max(self._sent_by_others, before + sent_bytes)
            self.note_progress()

        return OtherNodes(self.job.num_nodes, self.job.token, self.stopping, note)

    def _upload(self, name: str) -> None:
        checkpoint, options = self.root / name, {"num_threads": self.job.num_threads}
        started, sent_before = time.monotonic(), self.sent_bytes
        try:
            push_checkpoint(
                self.run_in_store,
                checkpoint,
                self.root / f"{LINK}{name}.json",
                throttle=self.throttle,
                on_other=lambda name: self._supersede([name]),
                others=self._other_nodes(),
                **options,
            )
            exports = set(complete_exports(checkpoint))
            push_exports(self.run_in_store, checkpoint, throttle=self.throttle, **options)
        except CheckpointUnusable as error:
            # Repeating cannot help: the checkpoint is damaged, or something else has its name.
            print_line(f"warning: {name} is not uploaded: {error}")
            self.note(error=str(error))
            unlink(self.root, LINK, name)
            return
        for log in LOGS:
            with contextlib.suppress(FileNotFoundError):
                data = read_safely(self.root, log)
                self.run_in_store.check_owner()
                self.store.write(log, data)
        self.run_in_store.point(self.job.metric_key, self._keep.mode)
        # Without its link, it may be removed.
        self._stored.update(self._records([name]))
        unlink(self.root, LINK, name)
        if set(complete_exports(checkpoint)) - exports:
            # It was made meanwhile, and its request was the link that is removed now.
            link(self.root, LINK, name)
        self.note(uploaded=name, failures=0, error="")
        nbytes = self.sent_bytes - sent_before
        if nbytes:
            size = f"{nbytes / 1e6:.1f} MB in {time.monotonic() - started:.1f} s"
            print_line(f"uploaded {name} to {self.store}: {size}")
        try:
            for removed in prune(self.run_in_store, self._keep, self.job.metric_key):
                print_line(f"removed {self.store}/{removed}")
        except StoreError as error:
            # The next upload tries again.
            print_line(f"warning: not all old checkpoints could be removed from the store: {error}")


def main(arguments: list[str]) -> int:
    """Upload until the trainer asks to finish, or for some time after it has ended otherwise."""
    root = Path(arguments[0])
    return serve(root, LOCK, lambda job: Uploader(root, Job(**job)))
