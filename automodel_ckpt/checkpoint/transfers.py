"""What a checkpointer transfers from and to an object store: the checkpoint of a start, and those that it publishes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.store_url import check_url, is_url, scratch_directory, with_remote
from automodel_ckpt.checkpoint.options import CheckpointOptions, RemoteStorage
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.links import (
    TO_STORE,
    clear_links,
    own_name,
    remove_fetched,
)
from automodel_ckpt.checkpoint.saving.save import SaveSettings
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.parallel.ranks import agree

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.memory.nodes import Nodes
    from automodel_ckpt.checkpoint.remote.background import Uploads
    from automodel_ckpt.checkpoint.remote.child_process import UploadingProcess
    from automodel_ckpt.checkpoint.remote.fetch import Fetched, Fetcher

log = logging.getLogger("automodel_ckpt")


class Transfers:
    """The downloads and uploads of a run, by the options ``remote`` and ``restore_from``.

    Rank 0 transfers. Methods are collective unless they state otherwise. Without a store, they do nothing. Raises
    :class:`RecipeError` for a URL or options that cannot be used.
    """

    uploads: Uploads | None
    """The uploads of rank 0 after :meth:`open`; None on other ranks, and without ``remote``."""
    fetcher: Fetcher | None
    """What downloads, on rank 0 after :meth:`open`; None on other ranks, and without a URL to download from."""

    def __init__(self, settings: SaveSettings) -> None:
        options = settings.options
        if options.remote is not None:
            from automodel_ckpt.checkpoint.remote.background import check_remote

            check_remote(options.remote)
        self.uploads = None
        self.fetcher = None
        self._nodes: Nodes | None = None
        self._part_uploads: UploadingProcess | None = None
        self._options = options
        self._settings = settings

    @property
    def _run(self) -> RunDirectory:
        return self._settings.run

    def use_nodes(self, nodes: Nodes) -> None:
        """Upload checkpoints from the directories of all *nodes*. Called by all ranks after :meth:`open`."""
        self._nodes = nodes
        if self.uploads is not None:
            self.uploads.job["num_nodes"] = len(nodes.nodes)
        if self.fetcher is not None:
            self.fetcher.always_streams = True

    def open(self) -> None:
        """Prepare uploads and downloads. Called by rank 0, which holds the run directory.

        Raises :class:`RecipeError` and :class:`StoreError` where a store cannot be used.
        """
        if self.uploads is not None or self.fetcher is not None:
            return
        options = self._options
        remove_fetched(self._run.root)
        if options.remote is None:
            clear_links(self._run.root, TO_STORE)
        else:
            metric_key, mode = options.best_metric_key, options.best_mode
            from automodel_ckpt.checkpoint.remote.background import Uploads

            self.uploads = Uploads(self._run.root, options.remote, metric_key, mode)
        if self._may_fetch:
            from automodel_ckpt.checkpoint.remote.fetch import Fetcher

            self.fetcher = Fetcher(self._run.root, options.remote)

    @property
    def _may_fetch(self) -> bool:
        return self._options.remote is not None or is_url(self._options.restore_from or "")

    # ---------------------------------------------------------------- downloads

    def expected(self) -> Summary | None:
        """The summary of the checkpoint that a load tries first, here or in the store; None in a new run.

        Called by rank 0 after :meth:`open`. It is not verified. Raises :class:`StoreError` if only a store can have
        one, and it cannot be read.
        """
        restore_from, run = self._options.restore_from, self._run
        found = None if self.fetcher is None else self.fetcher.expected(restore_from, run.memory)
        return found or resume.expected(run.root, restore_from, run.memory)

    def fetch(self) -> Fetched | None:
        """Fetch the checkpoint to resume from on rank 0, if a store has it and this machine does not.

        Returns None when it is in the run directory. Raises on all ranks what rank 0 raises.
        """
        restore_from = self._options.restore_from
        return self._fetch(lambda fetcher: fetcher.fetch(restore_from, self._run.memory))

    def fetch_up_to(self, step: int) -> Fetched | None:
        """Fetch the newest checkpoint of *step* or an earlier one, to which the run goes back while it trains.

        Returns None when this machine has one that is as new, no store has a newer one, or the store cannot be read.
        Raises on all ranks what rank 0 raises.
        """

        def fetch(fetcher: Fetcher) -> Fetched | None:
            # A removal in progress could still remove what is found.
            self._run.wait()
            went_back_to = self._run.went_back_to
            last = step if went_back_to is None else min(step, went_back_to)
            return fetcher.fetch_up_to(last, self._run.memory)

        return self._fetch(fetch)

    def _fetch(self, fetch_with: Callable[[Fetcher], Fetched | None]) -> Fetched | None:
        """Call *fetch_with* on rank 0, and bring what it fetched to the other nodes that do not share the directory."""
        if not self._may_fetch:
            return None
        fetched: Fetched | None = None

        def fetch() -> Fetched | None:
            if self._settings.is_rank0:
                # Programs that use a checkpointer without open() have created neither.
                self._run.hold()
                self.open()
            return None if self.fetcher is None else fetch_with(self.fetcher)

        def cancel() -> None:
            if self.fetcher is not None:
                self.fetcher.stopping.set()

        def bring() -> None:
            if fetched is not None and self._leads_other_node:
                fetched.bring(self._run.root)

        try:
            with self._settings.raise_on_all_ranks("downloading a checkpoint", CheckpointUnusable):
                # A download may take longer than the timeout of the group.
                fetched = agree.while_working(self._settings.group, fetch, cancel=cancel)
        except BaseException:
            # Also a stop request.
            if self._settings.is_rank0:
                with contextlib.suppress(OSError):
                    remove_fetched(self._run.root)
            raise
        fetched = agree.broadcast_object(self._settings.group, fetched)
        if self._nodes is not None:
            with self._settings.raise_on_all_ranks("downloading a checkpoint", CheckpointUnusable):
                agree.while_working(self._settings.group, bring)
        return fetched

    @property
    def _leads_other_node(self) -> bool:
        """Whether this is the first rank of a node other than rank 0's, and the nodes have separate directories."""
        return self._nodes is not None and self._nodes.is_leader and not self._settings.is_rank0

    def remove_fetched(self, fetched: Fetched | None) -> None:
        """Remove what :meth:`fetch` returned, after all ranks have read it. Not collective."""
        if fetched is not None and (self._settings.is_rank0 or self._leads_other_node):
            with contextlib.suppress(OSError):
                remove_fetched(self._run.root)

    # ---------------------------------------------------------------- uploads

    def start_uploads(self, step: int | None, name: str = "") -> None:
        """Upload what the run publishes after *step*; None: a new run. The checkpoint of *step* has the name *name*."""
        remote = self._options.remote
        self._use_uploads("starting the uploads", lambda uploads: self._start(uploads, step, name))
        if remote is None or self._nodes is None or self._part_uploads is not None:
            return
        mine = "" if self.uploads is None else self.uploads.token
        token = agree.broadcast_object(self._settings.group, mine)
        with self._settings.raise_on_all_ranks("starting the uploads"):
            if self._leads_other_node:
                from automodel_ckpt.checkpoint.remote.background import part_uploads

                self._part_uploads = part_uploads(self._run.root, remote, token, self._nodes.own)
                self._part_uploads.start()

    def _use_uploads(self, doing: str, work: Callable[[Uploads], None]) -> None:
        """Call *work* with the uploads of rank 0. All ranks wait, and raise what it raises."""
        if self._options.remote is None:
            return

        def use() -> None:
            if self.uploads is not None:
                work(self.uploads)

        with self._settings.raise_on_all_ranks(doing):
            # The ranks of other nodes must not end before: their processes upload parts.
            agree.while_working(self._settings.group, use)

    def _start(self, uploads: Uploads, step: int | None, name: str) -> None:
        if self._run.root != uploads.root:
            message = "checkpoints are not uploaded: the run continues in %s, beside the run of checkpoint.remote"
            log.warning(message, self._run.path)
            self.uploads = None
            return
        self._run.on_published = uploads.note_published
        self._run.on_exported = uploads.process.request
        is_here = step is not None and (uploads.root / name).is_dir()
        uploads.start(step, name if is_here else None)

    def roll_back(self, step: int) -> None:
        """Continue the uploads after *step*, to which the run went back."""
        self._use_uploads("starting the uploads", lambda uploads: uploads.roll_back(step))

    def finish(self, must_end: Callable[[], bool] = lambda: False) -> None:
        """Wait until the checkpoints are in the store of ``remote``; without ``required``, while it answers.

        Rank 0 calls *must_end* several times per second. The wait ends when it returns true. Raises
        :class:`SaveFailed` on all ranks if a checkpoint or an export is not in the store then.
        """

        def finish(uploads: Uploads) -> None:
            uploads.finish(must_end)
            # Checkpoints were kept for their upload.
            self._run.prune("")
            if self._nodes is not None:
                self._nodes.remove_others()

        self._use_uploads("uploading the last checkpoint", finish)

    @property
    def uploading(self) -> str:
        """How far the uploads are that the run waits for. Empty on other ranks than rank 0. Not collective."""
        return "" if self.uploads is None else self.uploads.process.uploading

    def finish_before_stop(
        self,
        seconds_since_signal: float,
        must_end: Callable[[], bool],
        *,
        grace_seconds: float = math.inf,
    ) -> None:
        """Wait for uploads after a signal, until ``remote.wait_after_signal_seconds`` after it.

        *seconds_since_signal* can differ between ranks: the largest counts. It is not waited for longer than
        *grace_seconds* after the signal. Rank 0 calls *must_end* several times per second; if it returns true, the wait
        ends. A checkpoint that is not in the store then is logged.
        """
        remote = self._options.remote
        if remote is None:
            return
        passed = max(agree.gather_objects(self._settings.group, seconds_since_signal))
        seconds = min(remote.wait_after_signal_seconds, grace_seconds) - passed

        self._use_uploads(
            "uploading the last checkpoint",
            lambda uploads: uploads.finish_before_stop(seconds, must_end),
        )

    def close(self) -> None:
        """Let the uploads go on without this process. Not collective."""
        if self.uploads is not None:
            self.uploads.close()
        if self._part_uploads is not None:
            self._part_uploads.leave()


def with_local_directory(
    directory: str | os.PathLike[str], options: Any
) -> tuple[Path, CheckpointOptions]:
    """Replace a URL as *directory* by a local one, and the URL of a checkpoint of the same run by its name.

    *options* are a checkpointer's options, or a recipe's section. Raises :class:`RecipeError` for a URL that cannot be
    used.
    """
    url = os.fspath(directory)
    if is_url(url):
        check_url(url, "directory")
        directory = scratch_directory(url, options.scratch_dir)
        # Before the conversion: it reads a key that only a section has.
        options = with_remote(options, url, RemoteStorage)
    resolved = CheckpointOptions.of(options)
    name = own_name(resolved.restore_from, resolved.remote)
    if name != resolved.restore_from:
        resolved = replace(resolved, restore_from=name)
    return Path(directory), resolved


def is_scratch_directory(directory: Path, options: CheckpointOptions) -> bool:
    """Whether *directory* is the local directory of a run, and the run's own directory is the URL of ``remote``."""
    if options.remote is None:
        return False
    local = scratch_directory(options.remote.url, options.scratch_dir)
    return directory == local.absolute()
