"""Upload the checkpoints of a run while it trains.

What has to be uploaded are the checkpoints with a link ``.upload-NAME`` in the run directory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.export.export_manifest import complete_exports
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.remote.child_process import UploadLoop, print_line, serve
from automodel_ckpt.checkpoint.remote.exports import push_exports
from automodel_ckpt.checkpoint.remote.parts import OtherNodes
from automodel_ckpt.checkpoint.remote.pull import LOGS
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run import policy, resume
from automodel_ckpt.checkpoint.run.pending import TO_STORE, link, pending, step_of, unlink
from automodel_ckpt.checkpoint.store import gone_back
from automodel_ckpt.checkpoint.store.store import Store, StoreError
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import CheckpointUnusable

LINK = TO_STORE
STATUS = ".remote.json"
LOCK = ".remote.lock"


@dataclass(frozen=True, slots=True)
class Job:
    """What to upload where. *went_back_to* is the step that the run resumed from; later checkpoints are superseded."""

    url: str
    options: Mapping[str, Any]
    token: str
    metric_key: str
    mode: policy.Mode
    keep_last: int | None = None
    keep_best: int = 0
    keep_every_steps: int | None = None
    keep_steps: Sequence[int] = ()
    bytes_per_second: float | None = None
    num_threads: int = 8
    went_back_to: int = 0
    num_nodes: int = 1
    """More than one: each node has a part of the files of each checkpoint, and uploads it."""

    @property
    def keep(self) -> policy.KeepPolicy:
        """The keep policy of the store."""
        return policy.KeepPolicy(
            self.keep_last,
            self.keep_best,
            self.keep_every_steps,
            frozenset(self.keep_steps),
            self.mode,
        )


class Uploader(UploadLoop):
    """Uploads the pending checkpoints of the run in *root* to a store."""

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, LINK, STATUS)
        self._job = job
        self._store = Store(job.url, job.options, where="checkpoint.remote")
        self._run = RemoteRun(self._store, token=job.token)
        self._throttle = Throttle(job.bytes_per_second)
        self._sent_by_others = 0
        self._has_begun = False
        self._stored: dict[str, policy.Record] = {}
        """The checkpoints that this process has uploaded, by name."""
        # After a run went back, the status of an earlier process may name a later step.
        self._is_first = True
        self.note(error="", failures=0, is_over=False, complete=())

    @property
    def sent_bytes(self) -> int:
        """The bytes that were sent, also by the other nodes."""
        return self._throttle.nbytes + self._sent_by_others

    def stop(self) -> None:
        """Make :meth:`run` return after the request in progress, however much is pending."""
        super().stop()
        self._throttle.stop()

    def catch_up(self) -> None:
        """Upload all pending checkpoints. Raises what an upload raises."""
        job = self._job
        if not self._has_begun:
            self._become_owner()
            for name in self._run.supersede_after(job.went_back_to, job.metric_key, job.mode):
                print_line(f"marked {self._store}/{name} as superseded")
            gone_back.forget(self.root)
            self._has_begun = True
        while (names := self._worth_uploading()) and not self.stopping.is_set():
            self._upload(names[0])

    def _become_owner(self) -> None:
        """Take over the URL, once: a repetition would take it back from a run that started meanwhile."""
        token = self._job.token
        if self.status.owner == token:
            # Also in an earlier process of this start, which ended unexpectedly.
            self._run.continue_ownership()
            return
        if not self._run.take_over():
            print_line(
                f"{self._store} has no conditional writes: two runs with this URL could overwrite each other's objects"
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
        if self._job.keep_last is None:
            return names
        records = dict(self._stored)
        for name in names:
            found = resume.record(self.root, name, self._job.metric_key, {})
            if found is not None:
                records[name] = found
        # The pointers of the store will name them.
        pointed = {record.name for record in policy.newest_first(records.values())[:1]}
        best = policy.best(records.values(), self._job.mode)
        if best is not None:
            pointed.add(best.name)
        not_kept = {each.name for each in self._job.keep.removable(list(records.values()), pointed)}
        for name in not_kept.intersection(names):
            if (self.root / f"{LINK}{name}.json").exists():
                # What an interrupted upload has sent. Pointers name it if only its link was left.
                with contextlib.suppress(ValueError):
                    self._run.withdraw(name)
            unlink(self.root, LINK, name)
        return [name for name in names if name not in not_kept]

    def _supersede(self, name: str) -> None:
        """Give up the pointers to a checkpoint of the store, which the run saved again after it went back."""
        job = self._job
        if self._run.supersede([name], "the run saved this step again", job.metric_key, job.mode):
            print_line(f"marked {self._store}/{name} as superseded")

    def _other_nodes(self) -> OtherNodes | None:
        """The nodes that upload their parts of a checkpoint; None if this one has all files."""
        job = self._job
        if job.num_nodes == 1:
            return None
        before = self._sent_by_others

        def note(sent_bytes: int) -> None:
            self._sent_by_others = max(self._sent_by_others, before + sent_bytes)
            self.note_progress()

        return OtherNodes(job.num_nodes, job.token, self.stopping, note)

    def _upload(self, name: str) -> None:
        job = self._job
        started = time.monotonic()
        sent_before = self.sent_bytes
        try:
            push_checkpoint(
                self._run,
                self.root / name,
                self.root / f"{LINK}{name}.json",
                throttle=self._throttle,
                num_threads=job.num_threads,
                on_file=lambda file: self.note(),
                on_other=self._supersede,
                others=self._other_nodes(),
            )
            self.note(complete=list(dict.fromkeys([*self.status.complete, name])))
            exports = set(complete_exports(self.root / name))
            push_exports(
                self._run,
                self.root / name,
                throttle=self._throttle,
                num_threads=job.num_threads,
            )
        except CheckpointUnusable as error:
            # Repeating cannot help: the checkpoint is damaged, or something else has its name.
            print_line(f"warning: {name} is not uploaded: {error}")
            self.note(error=str(error))
            unlink(self.root, LINK, name)
            return
        for log in LOGS:
            with contextlib.suppress(FileNotFoundError):
                data = read_safely(self.root, log)
                self._run.check_owner()
                self._store.write(log, data)
        self._run.point(job.metric_key, job.mode)
        # Without its link, it may be removed.
        record = resume.record(self.root, name, job.metric_key, {})
        if record is not None:
            self._stored[name] = record
        unlink(self.root, LINK, name)
        if set(complete_exports(self.root / name)) - exports:
            # It was made meanwhile, and its request was the link that is removed now.
            link(self.root, LINK, name)
        newest = self.status.uploaded
        if newest is None or step_of(newest) < step_of(name) or self._is_first:
            newest = name
        self._is_first = False
        others = [each for each in self.status.complete if each != name]
        self.note(uploaded=newest, failures=0, error="", complete=others)
        seconds = max(time.monotonic() - started, 1e-3)
        nbytes = self.sent_bytes - sent_before
        if nbytes:
            size = f"{nbytes / 1e6:.1f} MB in {seconds:.1f} s"
            print_line(f"uploaded {name} to {self._store}: {size}")
        self._prune()

    def _prune(self) -> None:
        """Remove what the keep policy of the store does not keep. A failure is logged; the next upload tries again."""
        try:
            for removed in self._run.prune(self._job.keep, self._job.metric_key):
                print_line(f"removed {self._store}/{removed}")
        except StoreError as error:
            print_line(f"warning: not all old checkpoints could be removed from the store: {error}")


def main(arguments: list[str]) -> int:
    """Upload until the trainer asks to finish, or for some time after it has ended otherwise."""
    root = Path(arguments[0])
    return serve(root, LOCK, lambda job: Uploader(root, Job(**job)))
