"""The uploads of a run, seen from rank 0 of the trainer, which starts the uploading process and waits for it."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path

from automodel_ckpt.checkpoint import commit, layout, policy
from automodel_ckpt.checkpoint.export_manifest import exports_in
from automodel_ckpt.checkpoint.options import RemoteOptions
from automodel_ckpt.checkpoint.remote import gone_back
from automodel_ckpt.checkpoint.remote.child_process import Child, Status
from automodel_ckpt.checkpoint.remote.pending import link, pending, step_of, unlink
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.store import Store
from automodel_ckpt.checkpoint.remote.uploader import LINK, LOCK, STATUS, Job
from automodel_ckpt.errors import SaveFailed
from automodel_ckpt.store_url import check_library, check_options, check_url

log = logging.getLogger("automodel_ckpt")

_KEY = "checkpoint.remote"
_MODULE = "automodel_ckpt.checkpoint.remote.uploader"


def check_remote(settings: RemoteOptions) -> None:
    """Raise :class:`RecipeError` for a URL or options that cannot be used. Makes no request."""
    check_library(check_url(settings.url, f"{_KEY}.url"), f"{_KEY}.url")
    check_options(settings.options, f"{_KEY}.options")


class Uploads:
    """Uploads the checkpoints that the run in *root* publishes.

    Only rank 0 uses it. Nothing but :meth:`finish` waits for the network.
    """

    def __init__(
        self, root: Path, settings: RemoteOptions, metric_key: str, mode: policy.Mode
    ) -> None:
        """Raises :class:`RecipeError` for a URL or options that cannot be used."""
        self.root = root
        self._settings = settings
        self._run = RemoteRun(Store(settings.url, settings.options, where=_KEY))
        rate = settings.max_mb_per_second
        self.job = Job(
            url=settings.url,
            options=dict(settings.options),
            token=self._run.token,
            metric_key=metric_key,
            mode=mode,
            keep_last=settings.keep_last,
            keep_best=settings.keep_best,
            keep_every_steps=settings.keep_every_steps,
            keep_steps=list(settings.keep_steps),
            bytes_per_second=None if rate is None else 1e6 * rate,
            num_threads=settings.num_threads,
        )
        self._process: Child | None = None
        self._newest: str | None = None

    # ---------------------------------------------------------------- the start

    def start(self, resumed_step: int | None, resumed_name: str | None = None) -> None:
        """Start the uploading process. The run continues from *resumed_step*; None if it begins.

        Checkpoints after this step that were to be uploaded are not: the run went back to a step before them.
        *resumed_name* is the checkpoint of this step in the run directory, if it is there. It is uploaded unless the
        store has it: a kill may have prevented its link.
        """
        if self._process is not None:
            return
        for name in pending(self.root, LINK):
            if step_of(name) > (resumed_step or 0):
                unlink(self.root, LINK, name)
        if resumed_name is not None:
            link(self.root, LINK, resumed_name)
        self._launch(gone_back.note(self.root, resumed_step or 0, self.job.token))

    def roll_back(self, step: int) -> None:
        """Continue after *step*, to which the run went back while it trains: later checkpoints are abandoned."""
        if self._process is not None:
            # It completes the upload in progress. The next one, which waits for its lock, marks it as superseded.
            self.close()
            self._newest = None
            self.start(step)

    def _launch(self, went_back_to: int) -> None:
        # The process writes the owner's object: here, a slow store would delay training.
        job = replace(self.job, went_back_to=went_back_to)
        self._process = Child(_MODULE, self.root, LOCK, asdict(job))

    def note_published(self, name: str) -> None:
        """Have a published checkpoint uploaded. Until it is, it is not removed from the local disk."""
        self._newest = name
        process = self._process
        has_ended = process is None or process.has_ended
        if has_ended and self._status().is_over:
            # Another run took over the URL: a link would keep the checkpoint on the local disk forever.
            log.warning("%s is not uploaded: %s", name, self._status().error)
            return
        link(self.root, LINK, name)
        if has_ended:
            if process is not None:
                log.warning("the uploading process ended unexpectedly; it is started again")
            self._launch(step_of(name))

    def _status(self) -> Status:
        return Status.read(self.root, STATUS)

    # ---------------------------------------------------------------- the end

    def finish(self) -> None:
        """Have the exports of the newest and the best checkpoint uploaded, and wait for all uploads of a run that ends.

        Without ``required``, only as long as they make progress. Raises :class:`SaveFailed` if the newest checkpoint
        is not in the store then.
        """
        process = self._process
        if process is None:
            return
        for pointer in layout.POINTERS:
            name = commit.pointed(self.root, pointer)
            if name is not None and (self.root / name).is_dir() and exports_in(self.root / name):
                # It was made after the checkpoint was uploaded. The rules of the store never remove these two.
                link(self.root, LINK, name)
        process.finish(self._status, waits=self._settings.required)
        missing = pending(self.root, LINK)
        if missing or not self._newest_is_stored():
            raise SaveFailed(
                "the newest checkpoint is not in the store; it is complete on the local disk",
                where=str(self._run.store),
                value=self._status().error or ", ".join(missing) or str(self._newest),
                hint=f"upload it with `ckpt push {self.root} {self._run.store}`",
            )

    def _newest_is_stored(self) -> bool:
        """Read from the store whether it has the newest checkpoint that was published, if there is one.

        The status is not enough: the process of an earlier start may have written it.
        """
        name = layout.parse_checkpoint_name(self._newest) if self._newest is not None else None
        return name is None or self._run.checkpoint(name) is not None

    def close(self) -> None:
        """Let the process finish what is pending, without waiting for it."""
        if self._process is not None:
            self._process.leave()
            self._process = None
