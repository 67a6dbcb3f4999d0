"""Save and load checkpoints: :class:`Checkpointer` stores a mapping of state and restores it.

    checkpointer = Checkpointer("checkpoints", options=CheckpointOptions(keep_last=3))
    state = {"model": model, "optimizer": optimizer}
    resumed = checkpointer.load(state)          # None: a new run
    checkpointer.save(state, step=20, epoch=0)
    checkpointer.close()

A save has three steps, each followed by a short collective: every rank plans, every rank writes, and rank 0 publishes.
A failure on one rank is raised on all ranks, with that rank's message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import layout, policy
from automodel_ckpt.checkpoint.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.discovery import classify
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.files.file_system import overlay_warning
from automodel_ckpt.checkpoint.loader import CheckpointLoader, Resumed
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.options import CheckpointOptions, Options, RemoteStorage
from automodel_ckpt.checkpoint.remote.background import Uploads, check_remote
from automodel_ckpt.checkpoint.remote.fetch import Fetched, Fetcher, own_name, remove_fetched
from automodel_ckpt.checkpoint.remote.pending import clear_links
from automodel_ckpt.checkpoint.remote.uploader import LINK
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.shared_storage import check_shared_storage
from automodel_ckpt.checkpoint.saving.async_saves import AsyncSaves, on_cuda
from automodel_ckpt.checkpoint.saving.exports import Exports
from automodel_ckpt.checkpoint.saving.forecast import Forecast, check_manifest_size
from automodel_ckpt.checkpoint.saving.planner import Planner, Save, SaveReport, json_values
from automodel_ckpt.checkpoint.saving.side_files import Assets
from automodel_ckpt.checkpoint.saving.sync_save import SyncSaves
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import (
    AutomodelError,
    CheckpointUnusable,
    LeaseLost,
    RecipeError,
    SaveFailed,
)
from automodel_ckpt.store_url import check_url, is_url, scratch_directory, with_remote
from automodel_ckpt.units import size_text

__all__ = ["Checkpointer", "Resumed", "Saving"]

log = logging.getLogger("automodel_ckpt")

# Side files, headers and the alignment of files, in addition to a rank's share of the tensors.
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Saving:
    """The progress of a save: bytes written by this rank, and the approximate total of this rank."""

    step: int
    written_bytes: int
    total_bytes: int


class Checkpointer:
    """Saves and loads the state of a run in *directory*.

    A URL of an object store as *directory* stands for a local directory (``scratch_dir`` of *options*), from which
    checkpoints are uploaded.

    *group* is a gloo process group of all ranks, used by nothing else meanwhile, and *ranks* is this process's position
    in it. Without *ranks*, all ranks are data-parallel, and *group* is by default that of all ranks of
    torch.distributed where it is initialized. *options* is the ``checkpoint:`` section of a recipe, or
    :class:`~automodel_ckpt.checkpoint.options.CheckpointOptions`.

    *assets* gives, by the attribute name of a module, what its export needs (entries may be added to :attr:`assets`
    before the first save). A background save whose writer makes no progress for *timeout_seconds*, while all ranks wait
    for it, has failed. With *is_quiet*, saves are logged at the level debug. Raises :class:`RecipeError` for options
    that exclude each other.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        ranks: layout.RankLayout | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        *,
        assets: Mapping[str, Assets] | None = None,
        timeout_seconds: float = 1800.0,
        is_quiet: bool = False,
    ) -> None:
        directory, options = _resolved(
            directory, CheckpointOptions() if options is None else options
        )
        _validate_format(options)
        if ranks is None:
            if group is None and dist.is_initialized():
                group = dist.group.WORLD
            ranks = _ranks_in(group)
        self._ranks, self._group = ranks, group
        self._options = options
        self._timeout_seconds = timeout_seconds
        self.assets = dict(assets or {})
        keep = policy.KeepPolicy(
            options.keep_last,
            options.keep_best,
            options.keep_every_steps,
            frozenset(options.keep_steps),
            options.best_mode,
        )
        run = RunDirectory(directory, keep, options.best_metric_key)
        self._planner = Planner(run, ranks, self.assets, options)
        self._loader = CheckpointLoader(self._planner, options, group)
        self.exports = Exports(self._planner, group, self.wait_for_save)
        """The exports of this run's checkpoints as Hugging Face files."""
        self._uploads: Uploads | None = None
        self._fetcher: Fetcher | None = None
        self._remote_is_open = False
        if options.remote is not None:
            check_remote(options.remote)
        self._items_are_logged = is_quiet
        self._save_level = logging.DEBUG if is_quiet else logging.INFO
        self._is_async = options.is_async
        self._async: AsyncSaves | None = None
        self._sync = SyncSaves(self._planner, group, self.exports)

    @property
    def _run(self) -> RunDirectory:
        return self._planner.run

    @property
    def is_rank0(self) -> bool:
        """Whether this rank coordinates saves."""
        return self._ranks.rank == 0

    @property
    def notes(self) -> dict[str, str]:
        """Short texts that each checkpoint's manifest contains in ``environment``, such as ``precision``."""
        return self._planner.notes

    @property
    def directory(self) -> Path:
        """The run directory, as the user wrote it."""
        return self._run.path

    # ---------------------------------------------------------------- before training

    def open(self) -> None:
        """Create and lock the run directory before the model is built. Collective.

        Raises :class:`RecipeError` on all ranks where the directory cannot be written, another run uses it, or the
        ranks do not share it.
        """
        with self._raise_on_all_ranks("opening checkpoint.checkpoint_dir", RecipeError):
            if self.is_rank0:
                self._run.hold()
                self._open_remote()
                warning = overlay_warning(self.directory)
                if warning is not None:
                    log.warning("%s", warning)
        # A separate block: it has collectives, which rank 0 would miss if hold() failed in it.
        with self._raise_on_all_ranks("checking for shared storage", RecipeError):
            check_shared_storage(self._run.root, self._ranks.rank, self._group)

    def _open_remote(self) -> None:
        """Prepare uploads and downloads. Raises :class:`RecipeError` and :class:`StoreError` where a store cannot."""
        if self._remote_is_open:
            return
        options, root = self._options, self._run.root
        remove_fetched(root)
        if options.remote is None:
            clear_links(root, LINK)
        else:
            mode = options.best_mode
            self._uploads = Uploads(root, options.remote, options.best_metric_key, mode)
        if options.remote is not None or is_url(options.restore_from or ""):
            self._fetcher = Fetcher(root, options.remote)
        self._remote_is_open = True

    def check(self, state: Mapping[str, Any]) -> None:
        """Validate *state* before training. Raises :class:`RecipeError` for state that clashes or cannot be stored
        safely.
        """
        self._planner.check_state(classify(state))

    def check_lease(self) -> None:
        """Check that this run still holds its directory. Called by rank 0 before it writes there.

        Raises :class:`LeaseLost` where another run took over, OSError where that cannot be determined.
        """
        self._run.check_lease()

    def check_lease_on_all_ranks(self) -> None:
        """Raise :class:`LeaseLost` on all ranks where another run took over the directory. Collective."""
        doing = "checking which run holds the run directory"
        # Where that cannot be determined now (OSError), the next write fails instead.
        with self._raise_on_all_ranks(doing), contextlib.suppress(OSError):
            self.check_lease()

    @property
    def lease_is_lost(self) -> bool:
        """Whether this rank knows that another run took over the directory. Reads no file."""
        return self._run.is_lost

    def use_memory(self, directory: Path) -> None:
        """Let :meth:`load` also find the memory checkpoints in *directory*, which belong to this run."""
        self._run.memory = directory

    @property
    def memory_directory(self) -> Path | None:
        """The directory of the run's memory checkpoints; None without :meth:`use_memory`."""
        return self._run.memory

    def set_aside_abandoned(self) -> None:
        """Rename the checkpoints that the run abandoned when it went back, as its next save does. Called by rank 0.

        A failure is logged. After a lost lease, nothing happens: all ranks raise :class:`LeaseLost` soon.
        """
        # A save in progress does it when it is published.
        if not self.is_writing:
            with contextlib.suppress(LeaseLost):
                self._run.set_aside_abandoned()

    def forecast(self, state: Mapping[str, Any]) -> Forecast:
        """The expected bytes of one save, and the free bytes. Raises :class:`RecipeError` for state that cannot be
        stored.
        """
        return self._planner.forecast(classify(state))

    def check_disk_space(self, state: Mapping[str, Any]) -> Forecast | None:
        """Check before the first step that a checkpoint fits on the disk, and log its size. Collective.

        Returns the forecast on rank 0, None elsewhere. Raises :class:`SaveFailed` where it does not fit, and
        :class:`RecipeError` where its manifest would be too large to be read back.
        """
        forecast = None
        with self._raise_on_all_ranks("estimating the size of a checkpoint"):
            if self.is_rank0:
                forecast = self.forecast(state)
                check_manifest_size(self._planner.forecast_manifest_bytes(classify(state)))
                self._planner.check_fits(forecast)
                log.info(
                    "a checkpoint takes about %s; %s are free",
                    size_text(forecast.nbytes),
                    size_text(forecast.free_bytes),
                )
        return forecast

    # ---------------------------------------------------------------- save

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Set up asynchronous saves before the first step, or log why saves will be synchronous. Collective.

        Does nothing for synchronous saves.
        """
        if not self._is_async or self._async is not None:
            return
        reason = ""
        try:
            self._async = AsyncSaves(
                self._planner,
                self._group,
                timeout_seconds=self._timeout_seconds,
                on_cuda=on_cuda(state),
            )
            share_bytes = self.forecast(state).nbytes // self._ranks.world_size
            self._async.reserve(share_bytes + _SLACK_BYTES)
        except (OSError, AttributeError) as error:  # AttributeError: a system without memfd_create
            # Not raised here: every rank must reach the exchange below.
            reason = str(error)
        reasons = [reason for reason in agree.gather_objects(self._group, reason) if reason]
        if not reasons:
            return
        self._is_async = False
        self._close_async()
        if self.is_rank0:
            message = (
                "saves will be synchronous: a rank does not support asynchronous checkpointing: %s"
            )
            log.warning(message, reasons[0])

    def _close_async(self) -> None:
        if self._async is not None:
            saves, self._async = self._async, None
            saves.close()

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        epoch: int,
        config_yaml: str = "",
        losses: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
        validated: bool = False,
        last: bool = False,
        before_publishing: Callable[[], None] | None = None,
        on_saved: Callable[[SaveReport], None] | None = None,
    ) -> SaveReport:
        """Save *state* as ``epoch_{epoch}_step_{step}``; return when the checkpoint is published. Collective.

        With ``is_async`` it first waits for the previous save, and returns when the state is copied, with
        :attr:`SaveReport.published` false. A later failure of such a save is raised by :meth:`wait_for_save`.

        *config_yaml* is written to config.yaml, *progress* (numbers by name) to the manifest, and *losses* to
        losses.json; with *validated* they also rank the checkpoint. *last* marks the last save of a run that completes.
        Rank 0 calls *before_publishing* when all files are written, and *on_saved* with the report after publishing.
        Raises :class:`SaveFailed` on all ranks, and removes what was written.
        """
        self.wait_for_save()
        started = time.monotonic()
        self.prepare(state)
        save = Save(
            layout.CheckpointName(step=step, epoch=epoch),
            config_yaml=config_yaml,
            losses=dict(losses or {}),
            progress=dict(progress or {}),
            validated=validated,
            last=last,
            before_publishing=before_publishing,
            on_saved=on_saved,
            started=started,
        )
        if self.is_rank0:
            log.log(self._save_level, "Saving checkpoint to %s", self.directory / str(save.name))
        with save.staging.removed_on_failure():
            saves = self._sync if self._async is None else self._async
            report = saves.save_with_previous_plan(save, state)
            if report is not None:
                return report
            return self._plan_and_save(save, state, saves)

    def _plan_and_save(
        self, save: Save, state: Mapping[str, Any], saves: SyncSaves | AsyncSaves
    ) -> SaveReport:
        """Save with a new plan, which the ranks agree on by one exchange. Collective."""
        with self._raise_on_all_ranks(f"saving {save.name}"):
            self._planner.read_state(save, state)
            proposal = self._planner.propose(save)
        # After the block: the others would wait here for a rank that failed in it.
        proposals = agree.gather_objects(self._group, proposal)
        shares = self._planner.assign(save, proposals, self._group)
        save.staging.path = Path(proposals[0].staging or "")
        if self.is_rank0 and not self._items_are_logged:
            self._items_are_logged = True
            digests = [proposal.digests for proposal in proposals]
            _log_items(save, digests, save_optimizer=self._planner.save_optimizer)
        return saves.save(save, proposals, shares)

    # ---------------------------------------------------------------- saves in progress

    def saving(self) -> Saving | None:
        """The progress of the save in progress; None where there is none. Can be called from any thread."""
        # Local names: another thread may end the save between a check and a use.
        save, background = self._sync.in_progress, self._async
        if save is not None:
            total_bytes = save.total_bytes
            if total_bytes is not None:
                return Saving(save.name.step, METER.nbytes - save.bytes_before, total_bytes)
        progress = background.progress if background is not None else None
        if progress is None:
            return None
        return Saving(*progress)

    @property
    def is_writing(self) -> bool:
        """Whether this rank has a background save in progress."""
        return self._async is not None and self._async.is_writing

    @property
    def upload_failed(self) -> bool:
        """Whether this rank knows that the run cannot continue to save. All ranks should then call
        :meth:`wait_for_save`.

        True after a failed background save, or when another run took over the directory.
        """
        return self._run.is_lost or (self._async is not None and self._async.has_failed)

    def await_copies(self) -> None:
        """Call this before state on the device is changed: its copy may not be complete yet."""
        if self._async is not None:
            self._async.await_copies()

    def wait_for_save(self) -> bool:
        """Wait for the background save; return True if one was in progress. Collective.

        Raises :class:`SaveFailed` on all ranks where it failed or made no progress on any rank; its files are then
        removed.
        """
        return self._async is not None and self._async.wait_for_save()

    def disable_exports(self) -> None:
        """Make no exports from now on, and stop one that is in progress in the background. Call on all ranks."""
        self._planner.export_when = "never"
        if self._async is not None:
            self._async.disable_exports()

    def note_validation(self, resumed: Resumed, losses: Mapping[str, Any]) -> None:
        """Record the losses of a validation that ran after its checkpoint was published, so that it can be ranked."""
        if not self.is_rank0 or resumed.path.parent != self._run.root:
            return
        name, digest = resumed.path.name, resumed.manifest.digest
        # A lost lease is raised on all ranks before the next step.
        with contextlib.suppress(LeaseLost):
            self._run.note_validation(name, digest, json_values(losses))

    # ---------------------------------------------------------------- load

    def load(
        self,
        state: Mapping[str, Any],
        *,
        before_loading: Callable[[Path, Manifest], None] | None = None,
    ) -> Resumed | None:
        """Load the newest usable checkpoint, or the one that ``restore_from`` names, into *state*. Collective.

        Returns None in a new run. Skipped checkpoints are logged with the reason. Rank 0 calls *before_loading* with
        the chosen checkpoint; what that raises is raised on all ranks. Where the chosen checkpoint does not match
        *state*, was not named by the user, and *on_incompatible* is ``sibling``, the run continues in a sibling
        directory, which becomes :attr:`directory`.

        Raises :class:`CheckpointUnusable` on all ranks where no checkpoint can be used or the chosen one does not
        match.
        """
        fetched = self._fetch()
        try:
            resumed = self._loader.load(state, before_loading, fetched)
        finally:
            # Collective calls in load() end after the last read of all ranks.
            if fetched is not None and self.is_rank0:
                with contextlib.suppress(OSError):
                    remove_fetched(self._run.root)
        if self._options.remote is not None:
            with self._raise_on_all_ranks("starting the uploads"):
                if self._uploads is not None:
                    self._start_uploads(self._uploads, resumed)
        return resumed

    def roll_back(self, state: Mapping[str, Any], step: int) -> Resumed | None:
        """Load the newest usable checkpoint of *step* or an earlier one into *state*, during training. Collective.

        The next save renames the checkpoints of later steps to superseded ones. Returns None, with no effect, if there
        is no such checkpoint. Raises :class:`CheckpointUnusable` on all ranks if none of them can be used.
        """
        self.wait_for_save()
        resumed = self._loader.roll_back(state, step)
        if resumed is not None and self._options.remote is not None:
            with self._raise_on_all_ranks("starting the uploads"):
                if self._uploads is not None:
                    self._uploads.roll_back(resumed.step)
        return resumed

    def _fetch(self) -> Fetched | None:
        """Fetch the checkpoint to resume from on rank 0, if a store has it and this machine does not. Collective.

        Returns None if it is in the run directory.
        """
        restore_from = self._options.restore_from
        if self._options.remote is None and not is_url(restore_from or ""):
            return None
        failure: Exception | None = None
        fetched: Fetched | None = None

        def fetch() -> None:
            nonlocal failure, fetched
            try:
                if self.is_rank0:
                    # Programs that use a checkpointer without open() have created neither.
                    self._run.hold()
                    self._open_remote()
                if self._fetcher is not None:
                    fetched = self._fetcher.fetch(restore_from, self._run.memory)
            except (AutomodelError, OSError) as error:
                failure = error

        # A download may take longer than the timeout of the group.
        agree.while_working(self._group, fetch)
        with self._raise_on_all_ranks("downloading a checkpoint", CheckpointUnusable):
            if failure is not None:
                raise failure
        return agree.broadcast_object(self._group, fetched)

    def _start_uploads(self, uploads: Uploads, resumed: Resumed | None) -> None:
        if self._run.root != uploads.root:
            message = "checkpoints are not uploaded: the run continues in %s, beside the run of checkpoint.remote"
            log.warning(message, self.directory)
            self._uploads = None
            return
        self._run.on_published = uploads.note_published
        if resumed is None:
            uploads.start(None)
            return
        name = resumed.path.name
        is_here = (uploads.root / name).is_dir()
        uploads.start(resumed.step, name if is_here else None)

    # ---------------------------------------------------------------- end

    def finish_uploads(self) -> None:
        """Wait until the checkpoints are in the store of ``remote``; without ``required``, while it answers.

        Collective. Raises :class:`SaveFailed` on all ranks if the newest checkpoint is not in the store then. Returns
        immediately without ``remote``.
        """
        if self._options.remote is None:
            return
        failure: Exception | None = None

        def finish() -> None:
            nonlocal failure
            try:
                if self._uploads is not None:
                    self._uploads.finish()
            except (SaveFailed, OSError) as error:
                failure = error

        agree.while_working(self._group, finish)
        with self._raise_on_all_ranks("uploading the last checkpoint"):
            if failure is not None:
                raise failure
            if self.is_rank0:
                # They were kept for their upload.
                self._run.prune("")

    def wait(self) -> None:
        """Wait until this rank has no save or removal in progress. Not collective."""
        if self._async is not None:
            self._async.wait()
        self._run.wait()

    def close(self) -> None:
        """Wait, then release the run directory."""
        self.wait()
        self._close_async()
        if self._uploads is not None:
            self._uploads.close()
        # Last: until here, removals and a background save may write in the directory.
        self._run.release()

    def _raise_on_all_ranks(
        self, doing: str, kind: type[AutomodelError] = SaveFailed
    ) -> AbstractContextManager[None]:
        return raise_on_all_ranks(self._group, doing, self.directory, kind)


def _log_items(save: Save, digests: Sequence[Mapping[str, str]], *, save_optimizer: bool) -> None:
    """Log what is saved and where. *digests* has the digests of small state by name, for each rank."""
    for item in save.items:
        aliases = f" (also {', '.join(item.aliases)})" if item.aliases else ""
        is_optional = item.kind in ("optimizer", "lr_scheduler")
        differs = len({of_rank.get(item.name) for of_rank in digests}) > 1
        if is_optional and not save_optimizer:
            target = "not saved"
        elif differs:
            target = f"{item.name}/"
        else:
            target = item.path
        log.debug("  state: %s%s, %s -> %s", item.name, aliases, item.kind, target)


def _validate_format(options: Options) -> None:
    """Raise :class:`RecipeError` for a format that the layout of model files does not support."""
    if options.model_layout in (None, "shards") or options.model_save_format == "safetensors":
        return
    raise RecipeError(
        "Hugging Face files are always written as safetensors",
        where="checkpoint.model_save_format",
        value=options.model_save_format,
        hint="remove this key, or set checkpoint.model_layout to shards "
        f"(now {options.model_layout})",
    )


def _resolved(directory: str | os.PathLike[str], options: Options) -> tuple[Path, Options]:
    """Replace a URL as *directory*, and the URL of a checkpoint of the same run as ``restore_from``.

    Raises :class:`RecipeError` for a URL that cannot be used.
    """
    url = os.fspath(directory)
    resolved: Any = options
    if is_url(url):
        check_url(url, "directory")
        directory = scratch_directory(url, options.scratch_dir)
        resolved = with_remote(resolved, url, RemoteStorage)
    name = own_name(options.restore_from, resolved.remote)
    if name != options.restore_from:
        resolved = replace(resolved, restore_from=name)
    return Path(directory), resolved


def _ranks_in(group: ProcessGroup | None) -> layout.DataParallelRanks:
    """This process's rank and the number of ranks of *group*; one process without a group."""
    if group is None:
        return layout.DataParallelRanks()
    return layout.DataParallelRanks(dist.get_rank(group), dist.get_world_size(group))
