"""The uploads of a run, seen from the trainer, which starts the uploading processes and waits for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.base.store_url import check_library, check_options, check_url
from automodel_ckpt.checkpoint.export.export_manifest import exports_in
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.options import Mode, RemoteOptions
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.remote.child_process import UploadingProcess
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run import notes
from automodel_ckpt.checkpoint.run.links import TO_STORE, link, step_of
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import SaveFailed

log = logging.getLogger("automodel_ckpt")

LINK = TO_STORE
STATUS = ".remote.json"
PART_STATUS = ".remote-part.json"
LOCK = ".remote.lock"
_KEY = "checkpoint.remote"
_MODULE = "automodel_ckpt.checkpoint.remote.uploader"
_PART_MODULE = "automodel_ckpt.checkpoint.remote.part_uploader"


def check_remote(settings: RemoteOptions) -> None:
    """Raise :class:`RecipeError` for a URL or options that cannot be used. Makes no request."""
    check_library(check_url(settings.url, f"{_KEY}.url"), f"{_KEY}.url")
    check_options(settings.options, f"{_KEY}.options")


def _job(settings: RemoteOptions, token: str, **fields: Any) -> ValueDict:
    """Return the fields of a :class:`~.uploader.Job`."""
    rate = settings.max_mb_per_second
    return {
        "url": settings.url,
        "options": dict(settings.options),
        "token": token,
        "bytes_per_second": None if rate is None else 1e6 * rate,
        "num_threads": settings.num_threads,
        **fields,
    }


def part_uploads(root: Path, settings: RemoteOptions, token: str, node: int) -> UploadingProcess:
    """Return the process that uploads the files of a node other than rank 0's, with the run directory *root*.

    The first rank of the node *node* uses it. *token* is the token of rank 0's uploads. Nothing waits for the network.
    """
    job = _job(settings, token, node=node)
    name = "the uploading process of this node"
    return UploadingProcess(_PART_MODULE, root, LINK, LOCK, PART_STATUS, lambda: job, name=name)


class Uploads:
    """Uploads the checkpoints that the run in *root* publishes.

    Only rank 0 uses it. Nothing but :meth:`finish` waits for the network.
    """

    def __init__(self, root: Path, settings: RemoteOptions, metric_key: str, mode: Mode) -> None:
        """Raises :class:`RecipeError` for a URL or options that cannot be used."""
        self.root = root
        self._is_required = settings.required
        self._run = RemoteRun(Store(settings.url, settings.options, where=_KEY))
        self.token = self._run.token
        keep = {
            "last": settings.keep_last,
            "best": settings.keep_best,
            "every_steps": settings.keep_every_steps,
            "steps": list(settings.keep_steps),
            "mode": mode,
        }
        self.job = _job(settings, self.token, metric_key=metric_key, keep=keep, num_nodes=1)
        self.process = UploadingProcess(_MODULE, root, LINK, LOCK, STATUS, self._present_job)
        self._newest: str | None = None
        self._went_back_to = 0

    # ---------------------------------------------------------------- the start

    def start(self, resumed_step: int | None, resumed_name: str | None = None) -> None:
        """Start the uploading process. The run continues from *resumed_step*, which is None when the run begins.

        Checkpoints after this step that were to be uploaded are not: the run went back to a step before them.
        *resumed_name* is the checkpoint of this step in the run directory, if it is there. It is uploaded unless the
        store has it: a kill may have prevented its link.
        """
        if self.process.is_started:
            return
        if resumed_name is not None:
            link(self.root, LINK, resumed_name)
        self._went_back_to = notes.note_gone_back(self.root, resumed_step or 0, self.token)
        self.process.start(resumed_step or 0)

    def roll_back(self, step: int) -> None:
        """Continue after *step*, to which the run went back while it trains: later checkpoints are abandoned."""
        if self.process.is_started:
            # It stops when the next one, which waits for its lock, has been started.
            self.close()
            self._newest = None
            self.start(step)

    def _present_job(self) -> ValueDict:
        """What a process that starts now uploads. It also writes the owner's object, which would delay training here.

        While there is a record, the process has not marked the abandoned checkpoints of earlier starts, and has
        uploaded nothing of this one. Otherwise, later checkpoints than the newest one of this start are abandoned, and
        not those that it has uploaded.
        """
        record = notes.GoneBack.read(self.root)
        step = self._went_back_to if self._newest is None else step_of(self._newest)
        return {**self.job, "went_back_to": step if record is None else record.step}

    def note_published(self, name: str) -> None:
        """Have a published checkpoint uploaded. Until it is, it is not removed from the local disk."""
        self._newest = name
        self.process.request(name)

    # ---------------------------------------------------------------- the end

    def finish(self, must_end: Callable[[], bool] = lambda: False) -> None:
        """Have the exports of the newest and the best checkpoint uploaded, and wait for all uploads as a run ends.

        Without ``required``, only as long as they make progress. The wait ends when *must_end* returns true. Raises
        :class:`SaveFailed` if a checkpoint or an export is not in the store then.
        """
        if not self.process.is_started:
            return
        for pointer in layout.POINTERS:
            name = commit.pointed(self.root, pointer)
            if name is not None and (self.root / name).is_dir() and exports_in(self.root / name):
                # An earlier start or `ckpt` may have made it. The rules of the store never remove these two.
                link(self.root, LINK, name)
        if missing := self.process.pending:
            log.info("waiting for the upload of %s", ", ".join(missing))
        self.process.raise_priority()
        self.process.finish(waits=self._is_required, must_end=must_end)
        missing = self.process.pending
        newest = layout.parse_checkpoint_name(self._newest or "")
        # The status is not enough: the process of an earlier start may have written it.
        if not missing and newest is not None and self._run.checkpoint(newest) is None:
            missing = [str(newest)]
        if missing:
            raise self._failure(missing)

    def _failure(self, missing: Sequence[str]) -> SaveFailed:
        """Return the error for checkpoints that are *missing* in the store, or lack an export there, newest first."""
        place, restart = "the local disk", ""
        hint = f"upload each with `ckpt push {self.root / missing[0]} {self._run.store}`"
        if self.job["num_nodes"] > 1:
            place, hint = "the disks of the nodes", ""
            restart = "run the same command on the same nodes"
        value = ", ".join(missing)
        error = self.process.status.error
        return SaveFailed(
            f"checkpoints or their exports are not in the store; they are complete on {place}",
            where=self._run.store,
            value=f"{value}; {error}" if error else value,
            hint=hint,
            restart=restart,
        )

    def finish_before_stop(self, seconds: float, must_end: Callable[[], bool]) -> None:
        """Wait up to *seconds* for the pending uploads, after a signal. Raises nothing.

        The wait ends when *must_end* returns true. It is logged if a checkpoint is not in the store then.
        """
        missing = self.process.pending
        if not self.process.is_started or not missing:
            return
        if seconds > 0:
            message = "waiting up to %.0f s for the upload of %s; another signal ends the wait"
            log.info(message, seconds, ", ".join(missing))
            end = time.monotonic() + seconds
            self.process.finish(waits=True, must_end=lambda: must_end() or time.monotonic() > end)
        missing = self.process.pending
        if missing:
            log.warning(
                "not in the store yet: %s; the upload continues for up to a minute while this machine runs, and "
                "otherwise when the run is started again with this disk",
                ", ".join(missing),
            )

    def close(self) -> None:
        """Let the process finish what is pending, without waiting for it."""
        self.process.leave()
