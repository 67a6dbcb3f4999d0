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

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from automodel_ckpt.base.durable_io import overlay_warning
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import METER
from automodel_ckpt.checkpoint.files.threads import collector_paused
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.loader import CheckpointLoader, Resumed
from automodel_ckpt.checkpoint.node_directories import (
    NodeDirectories,
    check_node_options,
    open_node_directories,
)
from automodel_ckpt.checkpoint.options import CheckpointOptions, validate_options
from automodel_ckpt.checkpoint.parts.discovery import (
    check_call,
    check_state,
    check_yaml,
    classify,
    count,
    path_text,
    plain_numbers,
)
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run.directory import OPENING, RunDirectory
from automodel_ckpt.checkpoint.run.resume import KeepPolicy
from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets, is_exportable
from automodel_ckpt.checkpoint.saving.planner import Planner
from automodel_ckpt.checkpoint.saving.publisher import Exports, SyncSaves
from automodel_ckpt.checkpoint.saving.save import Assets, Forecast, Save, SaveReport, SaveSettings
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.checkpoint.transfers import Transfers, with_local_directory
from automodel_ckpt.errors import RecipeError, SaveFailed
from automodel_ckpt.parallel.ranks import agree

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.memory.nodes import Nodes
    from automodel_ckpt.checkpoint.saving.async_saves import AsyncSaves

__all__ = ["Checkpointer", "Resumed", "Saving"]

log = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True, slots=True)
class Saving:
    """The progress of a save: bytes written by this rank, and the approximate total of this rank."""

    step: int
    written_bytes: int
    total_bytes: int


class Checkpointer:
    """Saves and loads the state of a run in *directory*.

    Args:
        directory: The run directory. For the URL of an object store, checkpoints are written to a local directory
            (``scratch_dir`` of *options*) and uploaded from there.
        ranks: This process's position among the ranks. By default, all ranks are data-parallel.
        group: A gloo process group of all ranks, which nothing else uses during a call. Without *ranks*, the default
            is a group of all ranks of torch.distributed, if it is initialized.
        options: The ``checkpoint:`` section of a recipe, or
            :class:`~automodel_ckpt.checkpoint.options.CheckpointOptions`, by default the latter without arguments.
        assets: What the exports of modules need, by attribute name. Entries may be added to :attr:`assets` before the
            first save. Modules without an entry are not exported.
        timeout_seconds: A background save has failed if all ranks wait for it and no writer makes progress for so long.
        is_quiet: Whether saves are logged at the level debug instead of info.
        nodes: If *directory* is not shared, each of these nodes has one, and checkpoints are distributed over them.

    Raises :class:`RecipeError` for options that exclude each other.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        ranks: layout.RankLayout | None = None,
        group: ProcessGroup | None = None,
        options: CheckpointOptions | Any = None,
        *,
        assets: Mapping[str, Assets] | None = None,
        timeout_seconds: float = 1800.0,
        is_quiet: bool = False,
        nodes: Nodes | None = None,
    ) -> None:
        options = CheckpointOptions() if options is None else options
        check_call(ranks, options, assets)
        if isinstance(options, CheckpointOptions):
            directory = path_text(directory)
        directory, options = with_local_directory(directory, options)
        validate_options(options)
        if ranks is None:
            if group is None and dist.is_initialized():
                group = dist.group.WORLD
            ranks = layout.DataParallelRanks()
            if group is not None:
                ranks = layout.DataParallelRanks(dist.get_rank(group), dist.get_world_size(group))
        self.is_rank0 = ranks.rank == 0
        """Whether this rank coordinates saves."""
        self._options = options
        self._timeout_seconds = timeout_seconds
        self.assets = dict(assets or {})
        keep = KeepPolicy(
            options.keep_last,
            options.keep_best,
            options.keep_every_steps,
            frozenset(options.keep_steps),
            options.best_mode,
        )
        run = RunDirectory(directory, keep, options.best_metric_key)
        # A notebook that creates its checkpointer again cannot close the lost one.
        self._release_if_lost = weakref.finalize(self, run.release)
        self._release_if_lost.atexit = False
        self._settings = SaveSettings(run, ranks, self.assets, options, group)
        if nodes is not None:
            self._settings.use_nodes(nodes)
        self.notes = self._settings.notes
        """Short texts that each checkpoint's manifest contains in ``environment``, such as ``precision``."""
        self._planner = Planner(self._settings)
        self._directories: NodeDirectories | None = None
        self.loader = CheckpointLoader(self._settings)
        """What loads. ``on_nodes`` has the checkpoints that are distributed over several nodes."""
        self.exports = Exports(self._settings, self.wait_for_save)
        """The exports of this run's checkpoints as Hugging Face files."""
        self.transfers = Transfers(self._settings)
        """What is transferred from and to the store of ``remote``."""
        self._save_level = logging.DEBUG if is_quiet else logging.INFO
        self._is_async = options.is_async
        self._async: AsyncSaves | None = None
        self._sync = SyncSaves(self._planner, self.exports)

    @property
    def run(self) -> RunDirectory:
        """The run directory with its lease; ``on_incompatible: sibling`` may replace it."""
        return self._settings.run

    @property
    def directory(self) -> Path:
        """The run directory, as the user wrote it."""
        return self.run.path

    @property
    def nodes(self) -> Nodes | None:
        """The nodes with a part of each checkpoint, if they share no storage. None before :meth:`open`."""
        return self._settings.nodes

    # ---------------------------------------------------------------- before training

    def open(self) -> None:
        """Create and lock the run directory before the model is built. Collective.

        With a URL as directory, the nodes need not share the local one. Raises :class:`RecipeError` on all ranks if the
        directory cannot be written, if another run uses it, or if the nodes do not share it although they have to.
        """
        with self._settings.raise_on_all_ranks(OPENING, RecipeError):
            if self.is_rank0:
                self.run.hold()
                self.transfers.open()
                warning = overlay_warning(self.directory)
                if warning is not None:
                    log.warning("%s", warning)
        if self.nodes is not None:
            return
        # Checkpoints are distributed over the directories of the nodes, if these do not share the run directory.
        directories = open_node_directories(
            self.run, self._settings.ranks.rank, self._settings.group, self._options
        )
        self._directories = directories
        if directories is None:
            return
        if directories.is_one:
            # What this start found is complete here.
            directories.nodes.release()
            return
        self.loader.on_nodes = directories.on_nodes
        check_node_options(self._options)
        self._settings.use_nodes(directories.nodes)
        self.transfers.use_nodes(directories.nodes)
        if self.is_rank0:
            message = "the nodes share no storage: each writes its part of a checkpoint to %s, and uploads it"
            log.info(message, self.directory)

    def check(self, state: Values) -> None:
        """Validate *state* before training. Raises :class:`RecipeError` for state that clashes or cannot be stored
        safely.
        """
        self._planner.check_state(state)

    def call_on_rank0(self, doing: str, work: Callable[[], object]) -> None:
        """Call *work* on rank 0, while the other ranks wait. Collective.

        Raises on all ranks what it raises. An error that is no :class:`AutomodelError` becomes :class:`SaveFailed` with
        *doing* in its message.
        """
        with self._settings.raise_on_all_ranks(doing):
            if self.is_rank0:
                work()

    def forecast(self, state: Values) -> Forecast:
        """The expected bytes of one save, and the free bytes. Raises :class:`RecipeError` for state that cannot be
        stored.
        """
        return self._planner.forecast(classify(state))

    def check_disk_space(self, state: Values) -> Forecast | None:
        """Check before the first step that a checkpoint fits on the disk, and log its size. Collective.

        Returns:
            The forecast on rank 0, None on other ranks.

        Raises:
            SaveFailed: if it does not fit.
            RecipeError: if the optimizer has state that a checkpoint cannot store.
        """
        forecast = None
        with self._settings.raise_on_all_ranks("estimating the size of a checkpoint"):
            if self.is_rank0:
                forecast = self.forecast(state)
                self._planner.check_fits(forecast, classify(state))
                size, free = size_text(forecast.nbytes), size_text(forecast.free_bytes)
                log.info("checkpoints are saved in %s, about %s each", self.directory, size)
                log.debug("%s are free", free)
        return forecast

    # ---------------------------------------------------------------- save

    def prepare(self, state: Values) -> None:
        """Set up asynchronous saves before the first step, or log why saves will be synchronous. Collective.

        Does nothing for synchronous saves. Raises on all ranks what one of them raises.
        """
        if not self._is_async or self._async is not None:
            return
        from automodel_ckpt.checkpoint.saving.async_saves import create_async_saves

        self._async, reason = create_async_saves(
            self._planner, state, timeout_seconds=self._timeout_seconds
        )
        if self._async is not None:
            # Its process may still write.
            self._release_if_lost.detach()
            return
        self._is_async = False
        if self.nodes is not None and self._directories is None:
            raise SaveFailed(
                "a rank does not support asynchronous checkpointing",
                where=self.directory,
                value=reason,
                hint="remove checkpoint.memory, which needs it on several nodes",
            )
        if self.is_rank0:
            message = (
                "saves will be synchronous: a rank does not support asynchronous checkpointing: %s"
            )
            log.warning(message, reason)

    @collector_paused()
    def save(
        self,
        state: Values,
        *,
        step: int,
        epoch: int,
        config_yaml: str = "",
        losses: Values | None = None,
        progress: Values | None = None,
        validated: bool = False,
        last: bool = False,
        before_publishing: Callable[[], None] | None = None,
        on_saved: Callable[[SaveReport], None] | None = None,
    ) -> SaveReport:
        """Save *state* as ``epoch_{epoch}_step_{step}``; return when the checkpoint is published. Collective.

        With ``is_async`` it first waits for the previous save, and returns when the state is copied, with
        :attr:`SaveReport.published` false. A later failure of such a save is raised by :meth:`wait_for_save`.

        Args:
            state: The objects with ``state_dict`` and ``load_state_dict``, by name; the same names on all ranks.
            step: The number of optimizer steps that are done.
            epoch: The number of the current epoch, from 0.
            config_yaml: The content of config.yaml in the checkpoint.
            losses: Numbers by name, for losses.json.
            progress: Numbers by name, for the manifest, such as the consumed tokens.
            validated: Whether *losses* are from a validation, by which the checkpoint is ranked (``keep_best``).
            last: Whether this is the last save of a run that completes.
            before_publishing: Called on rank 0 when all files are written.
            on_saved: Called on rank 0 with the report after publishing; by an asynchronous save in another thread.

        Raises :class:`SaveFailed` on all ranks, and removes what was written; :class:`RecipeError` for arguments that
        cannot be saved.
        """
        check_state(state)
        self._add_adapters(state)
        check_yaml(config_yaml)
        name = layout.CheckpointName(step=count("step", step), epoch=count("epoch", epoch))
        losses = plain_numbers("losses", losses or {})
        progress = plain_numbers("progress", progress or {})
        self.wait_for_save()
        started = time.monotonic()
        if self._directories is not None:
            self._directories.continue_from(None, self.notes, abandons_later=True)
        self.prepare(state)
        save = Save(
            name,
            config_yaml=config_yaml,
            losses=losses,
            progress=progress,
            validated=validated,
            last=last,
            before_publishing=before_publishing,
            on_saved=on_saved,
            started=started,
        )
        if self.is_rank0:
            log.log(self._save_level, "Saving checkpoint to %s", self.directory / str(save.name))
        try:
            if self._async is None:
                return self._plan_and_save(save, state, self._sync)
            report = self._async.save_with_previous_plan(save, state)
            if report is not None:
                return report
            return self._plan_and_save(save, state, self._async)
        # Not Exception: KeyboardInterrupt and DCP's CheckpointException do not derive from it.
        except BaseException:
            save.staging.remove()
            raise

    def _plan_and_save(
        self, save: Save, state: Values, saves: SyncSaves | AsyncSaves
    ) -> SaveReport:
        """Save with a new plan, which the ranks agree on by one exchange. Collective."""
        with self._settings.raise_on_all_ranks(f"saving {save.name}"):
            self._planner.read_state(save, state)
            proposal = self._planner.propose(save)
        # After the block: the others would wait here for a rank that failed in it.
        proposals = agree.gather_objects(self._settings.group, proposal)
        shares = self._planner.assign(save, proposals)
        save.staging.path = Path(proposals[0].staging)
        return saves.save(save, proposals, shares)

    # ---------------------------------------------------------------- saves in progress

    def saving(self) -> Saving | None:
        """The progress of the save in progress. Returns None when there is none. Can be called from any thread."""
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
        return self._async is not None and self._async.background.state == "busy"

    @property
    def upload_failed(self) -> bool:
        """Whether this rank knows that the run cannot continue to save.

        True after a failed background save, or if another run took over the directory. All ranks should then call
        :meth:`wait_for_save`.
        """
        return self.run.is_lost or (
            self._async is not None and self._async.background.state == "failed"
        )

    def await_copies(self) -> None:
        """Call this before state on the device is changed: its copy may not be complete yet."""
        if self._async is not None:
            self._async.background.await_copies()

    def wait_for_save(self) -> bool:
        """Wait for the background save; return True if one was in progress. Collective.

        Raises :class:`SaveFailed` on all ranks, and removes its files, if it failed or made no progress on any rank.
        """
        return self._async is not None and self._async.wait_for_save()

    def abandon_save(self) -> None:
        """Stop the background save in progress on this rank, if there is one, and remove its files. Local.

        The save cannot complete then: call it on all ranks, or before :meth:`close`.
        """
        if self._async is not None:
            self._async.abandon_save()

    def disable_exports(self) -> None:
        """Make no exports from now on, and stop one that is in progress in the background. Call on all ranks."""
        self._settings.export_when = "never"
        if self._async is not None:
            self._async.background.disable_exports()

    # ---------------------------------------------------------------- load

    @collector_paused()
    def load(
        self,
        state: Values,
        *,
        before_loading: Callable[[Path, Manifest], None] | None = None,
    ) -> Resumed | None:
        """Load the newest usable checkpoint, or the one that ``restore_from`` names, into *state*. Collective.

        Returns None in a new run. Skipped checkpoints are logged with the reason. Rank 0 calls *before_loading* with
        the chosen checkpoint; what that raises is raised on all ranks. If the chosen checkpoint does not match *state*,
        the user did not name it, and *on_incompatible* is ``sibling``, the run continues in a sibling directory, which
        becomes :attr:`directory`.

        Raises :class:`CheckpointUnusable` on all ranks if no checkpoint can be used or the chosen one does not match,
        and :class:`RecipeError` for a *state* that has no objects with state.
        """
        check_state(state, "Checkpointer.load")
        self._add_adapters(state)
        fetched = self.transfers.fetch()
        try:
            resumed = self.loader.load(state, before_loading, fetched)
        finally:
            # Collective calls in load() end after the last read of all ranks.
            self.transfers.remove_fetched(fetched)
        if self._directories is not None:
            abandons_later = self._options.restore_from is not None
            manifest = None if resumed is None else resumed.manifest
            self._directories.continue_from(manifest, self.notes, abandons_later=abandons_later)
        if resumed is None:
            self.transfers.start_uploads(None)
        else:
            self.transfers.start_uploads(resumed.step, resumed.path.name)
        return resumed

    def _add_adapters(self, state: Mapping[str, Any]) -> None:
        """Let checkpoints have the files of peft if *state* has adapters: nothing else could load them."""
        found = {}
        for name, value in state.items() if not self.assets else ():
            module = unwrap(value) if isinstance(value, nn.Module) else value
            if is_exportable(module):
                found[name] = module
        if found:
            # The ranks may have different files of the base.
            with self._settings.raise_on_all_ranks("reading the base of the adapters", RecipeError):
                for name, module in found.items():
                    self.assets[name] = AdapterAssets.from_model(
                        module, run=self.directory, rank=self._settings.ranks.rank
                    )
        if any(isinstance(each, AdapterAssets) for each in self.assets.values()):
            self._settings.use_adapter_file()

    @collector_paused()
    def roll_back(self, state: Values, step: int) -> Resumed | None:
        """Load the newest usable checkpoint of *step* or an earlier one into *state*, during training. Collective.

        It is fetched from the store of ``remote`` if the run directory has none that is as new. The next save renames
        the checkpoints of later steps to superseded ones. Returns None, with no effect, if there is no such checkpoint.
        Raises :class:`CheckpointUnusable` on all ranks if none of them can be used.
        """
        self.wait_for_save()
        fetched = self.transfers.fetch_up_to(step)
        if self._directories is not None:
            # The next generation continues those that this start has saved, too.
            self._directories.find()
        if self._directories is not None and self.nodes is not None:
            self.loader.on_nodes = self._directories.on_nodes
        try:
            resumed = self.loader.roll_back(state, step, fetched)
        finally:
            self.transfers.remove_fetched(fetched)
        if resumed is not None:
            if self._directories is not None:
                self._directories.has_generation = False
                self._directories.continue_from(resumed.manifest, self.notes, abandons_later=True)
            self.transfers.roll_back(resumed.step)
        return resumed

    # ---------------------------------------------------------------- end

    def wait(self) -> None:
        """Wait until this rank has no save or removal in progress. Not collective."""
        if self._async is not None:
            self._async.background.wait()
        self.run.wait()

    def close(self) -> None:
        """Wait, then release the run directory."""
        if self._async is not None:
            self._async.wait_for_nodes()
        self.wait()
        if self._async is not None:
            saves, self._async = self._async, None
            saves.close()
        self.transfers.close()
        if self._directories is not None:
            self._directories.nodes.release()
        # Last: until here, removals and a background save may write in the directory.
        self.run.release()
