"""What happens around the steps of any recipe: join the ranks, resume, log, validate, save, stop, end, close."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from automodel_ckpt.checkpoint import Checkpointer, discover
from automodel_ckpt.checkpoint.discovery import left_out
from automodel_ckpt.checkpoint.layout import CONFIG
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.state.loading import first_lines
from automodel_ckpt.config.bind import unused_without_checkpoints
from automodel_ckpt.config.changes import (
    changed_keys,
    check_overrides,
    ignored_by_resume,
    recipe_of,
    saved_recipe,
)
from automodel_ckpt.config.schema import InitFromConfig, ModelConfig, RecipeConfig
from automodel_ckpt.config.yaml_tree import DEFAULT
from automodel_ckpt.data.loader import GlobalBatchLoader
from automodel_ckpt.distributed.mesh import RankLayout, close_distributed, init_distributed
from automodel_ckpt.distributed.stop import PeerStop, StopRequest, stop_request
from automodel_ckpt.errors import (
    RecipeError,
    Stopped,
)
from automodel_ckpt.recipes.init_from import start_from
from automodel_ckpt.recipes.rank_consistency import validate_equal_on_all_ranks
from automodel_ckpt.recipes.records import StepResult, Validation
from automodel_ckpt.recipes.resume_overrides import RecipeOptions
from automodel_ckpt.recipes.run_log import RunLog
from automodel_ckpt.recipes.saves import Saves
from automodel_ckpt.seeds import seed_everything
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.step_scheduler import StepScheduler
from automodel_ckpt.training.tracker_process import require_trackers

log = logging.getLogger("automodel_ckpt")


MOVED_METHODS = {
    "micro_batch_loss": "an Objective, as loss(), and name the class in objective_class",
    "outcome": "an Objective, as row_loss(), and name the class in objective_class",
    "save": "a subclass of Saves, and name it in saves_class",
    "save_now": "a subclass of Saves, and name it in saves_class",
    "note_saved": "a subclass of Saves, and name it in saves_class",
    "settle": "a subclass of Saves, as wait(), and name it in saves_class",
    "flush_logs": "self.run_log, as flush()",
    "log_step": "step(), which can read self.last_step",
}
"""Methods that recipes had, and where to override each of them now."""


class Lifecycle:
    """A run from its beginning to its end, except for what it trains, which ``recipes.base.FinetuneRecipe`` adds."""

    config: RecipeConfig
    layout: RankLayout
    stop_request: StopRequest
    model: nn.Module
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    dataloader: GlobalBatchLoader
    step_scheduler: StepScheduler
    rng: StatefulRNG
    checkpointer: Checkpointer | None
    run_log: RunLog
    """The logs on disk, the progress line and the trackers."""
    saves_class: type[Saves] = Saves
    saves: Saves
    """What is saved and exported when, and what follows a failed save."""
    untracked: Collection[str] = ()
    """Names of attributes with state that is not saved; a class may set it, and so may :meth:`build`."""
    vocabulary: Sequence[str] = ()
    """Names of the model's parameters that ``model.vocab_size`` gives another number of rows."""

    def __init__(self, config: RecipeConfig, *, config_yaml: str) -> None:
        self.config = config
        self.config_yaml = config_yaml
        self.untracked: set[str] = set(self.untracked)
        self.checkpointer = None
        self._resources = ExitStack()
        """Closes what is open, in the reverse order; each resource is registered where it is opened."""
        self.last_step: StepResult | None = None
        self.origins: Mapping[str, str] = {}
        """Where each value of the recipe comes from, by dotted key; set by the command ``ckpt-train``."""
        self.overridden: Collection[str] = ()
        """The dotted keys that the command line gives, set likewise."""

    # ---------------------------------------------------------------- begin

    def join_ranks(self) -> RankLayout:
        """Process groups, log output, determinism, and the seed that makes all ranks draw the same fresh weights."""
        config = self.config
        require_trackers(config.logging.trackers, has_logs=config.checkpoint.enabled)
        ranks = config.distributed
        self._resources.callback(close_distributed)
        layout = init_distributed(
            backend=ranks.backend,
            timeout_minutes=ranks.timeout_minutes,
            dp_size=ranks.dp_size,
            dp_replicate_size=ranks.dp_replicate_size,
            tp_size=ranks.tp_size,
            pp_size=ranks.pp_size,
            cp_size=ranks.cp_size,
        )
        validate_equal_on_all_ranks(self.config_yaml, layout.gloo_group)
        self.stop_request = stop_request()
        if layout.world_size > 1:
            peer_stop = PeerStop(self.stop_request, dist.distributed_c10d._get_default_store())
            self._resources.callback(peer_stop.close)
        self.run_log = RunLog(config.logging, layout)
        self._resources.callback(self.run_log.close)
        if unused := unused_without_checkpoints(config):
            log.info(
                "nothing is saved, because checkpoint.enabled is false; no effect: %s",
                ", ".join(unused),
            )
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic)
        seed_everything(config.seed)
        return layout

    def hold_checkpointer(self, checkpointer: Checkpointer) -> None:
        """Close *checkpointer* with the recipe; the logs close before the lease of the run directory is released."""

        def close_files() -> None:
            lease_is_lost = checkpointer.lease_is_lost
            checkpointer.wait()
            self.run_log.close_files(lease_is_lost=lease_is_lost)

        self._resources.callback(checkpointer.close)
        self._resources.callback(close_files)

    def build_saves(self) -> Saves:
        """The object that saves the state of the run."""
        return self.saves_class(
            self.config,
            self.checkpointer,
            self.step_scheduler,
            self.run_log,
            partial(discover, self),
            config_yaml=self.config_yaml,
            num_ranks=self.layout.world_size,
        )

    def resume(self) -> None:
        """Load the newest usable checkpoint, if there is one, else what ``init_from`` names; ends ``setup``.

        Afterwards nothing may draw random numbers before the first step.
        """
        self._check_overrides()
        state = discover(self)
        if self.checkpointer is not None:
            self._resume(self.checkpointer, state)
        if self.saves.resumed is None and self.config.init_from is not None:
            self.start_from_weights(self.config.init_from, state)

    def start_from_weights(self, section: InitFromConfig, state: Mapping[str, Any]) -> None:
        """``init_from``: the weights of all modules among the state, in a run that is not resumed."""
        model = self.config.model
        start_from(
            section,
            {name: value for name, value in state.items() if isinstance(value, nn.Module)},
            ranks=self.layout,
            group=self.layout.gloo_group,
            resizable=self.vocabulary,
            new_rows=model.new_tokens if isinstance(model, ModelConfig) else "mean",
            verify=self.config.checkpoint.verify,
        )

    def _resume(self, checkpointer: Checkpointer, state: Mapping[str, Any]) -> None:
        self._log_omitted_state()
        checkpointer.check(state)
        from_recipe = self.config.optimizer.on_resume == "recipe"
        recipe_options = RecipeOptions(
            self.optimizer, self.lr_scheduler, from_recipe=from_recipe, overridden=self.overridden
        )
        resumed = checkpointer.load(state, before_loading=self._compare_recipes)
        self.saves.resumed = resumed
        self.run_log.open(checkpointer.directory, checkpointer.check_lease)
        if resumed is not None:
            self.run_log.progress.note_saved(resumed.step, time.time() - resumed.manifest.created)
            recipe_options.compare(self.step_scheduler, resumed.manifest.saved, resumed.path)
        self.saves.check_space(state, self._steps_per_epoch())
        if not self.step_scheduler.is_finished():
            checkpointer.prepare(state)
        self.run_log.resume(self.step_scheduler, resumed.path.name if resumed is not None else None)
        self.saves.make_missing_export()

    def _compare_recipes(self, checkpoint: Path, manifest: Manifest) -> None:
        """Report, on rank 0, which settings changed since *checkpoint* was saved.

        Raises :class:`RecipeError` for overrides on the command line that the resume would ignore.
        """
        saved = saved_recipe(checkpoint / CONFIG)
        if not saved or not self.config_yaml:
            return  # imported from another program, or by a script without a recipe file
        given = {key for key, origin in self.origins.items() if origin != DEFAULT}
        changes = changed_keys(saved, recipe_of(self.config_yaml), given)
        ignored = ignored_by_resume(changes, manifest.saved, self.config.optimizer.on_resume)
        check_overrides(ignored, self.overridden, checkpoint)
        lines = [
            f"{change} (not applied: the checkpoint has it)" if change in ignored else str(change)
            for change in changes
        ]
        if lines:
            log.warning(
                "settings changed since %s was saved:%s", checkpoint.name, first_lines(lines)
            )

    def _check_overrides(self) -> None:
        """An attribute that :meth:`build` named like a method would be called in its place, perhaps hours from now."""
        methods = {name for name in vars(self) if callable(getattr(type(self), name, None))}
        hidden = sorted(name for name in methods if not callable(vars(self)[name]))
        if hidden:
            raise RecipeError(
                "an attribute hides a method of the recipe",
                where=f"{type(self).__name__}.build",
                value=", ".join(hidden),
                hint="give the attribute another name",
            )

    def check_moved_methods(self) -> None:
        """Raise :class:`RecipeError` for a method that former versions called on the recipe: it would be ignored."""
        found = [name for name in MOVED_METHODS if hasattr(type(self), name)]
        if found:
            raise RecipeError(
                "the recipe overrides a method that another object has now",
                where=type(self).__name__,
                value=found[0],
                hint=f"override it in {MOVED_METHODS[found[0]]} (docs/guides/write-a-recipe.md)",
            )

    def _log_omitted_state(self) -> None:
        passed_over = dict(left_out(self))
        for name, why in passed_over.items():
            log.info("not saved, since %s: %s", why, name)
        for name in sorted(set(self.untracked) - passed_over.keys()):
            log.warning("untracked names %r, but the recipe has no such attribute", name)

    def _steps_per_epoch(self) -> int | None:
        """Optimizer steps of a whole epoch; None for a stream."""
        try:
            return len(self.dataloader)
        except TypeError:
            return None

    # ---------------------------------------------------------------- validate and save

    def validate(self) -> Validation | None:
        """The validation loss; None when a stop was asked for meanwhile. Subclasses define it."""
        raise NotImplementedError

    def validate_and_save(self, *, validate: bool, save: bool, last: bool = False) -> None:
        """What is due after a step, or before the next one, in the order that makes a save hold its own validation.

        Raises :class:`Stopped` where a signal cut that off: then :meth:`stop` saves.
        """
        started = time.monotonic()
        validation = self._validated() if validate else None
        if validate and validation is None:
            self.stop()
        losses = self.losses(validation)
        is_best = validation is not None and self.saves.note_if_best(losses)
        if (save or is_best) and self.step_scheduler.unsaved:
            self.saves.save(losses, validated=validation is not None, started=started, last=last)

    def _validated(self) -> Validation | None:
        validation = self.validate()
        if validation is None:
            return None
        scheduler = self.step_scheduler
        scheduler.note_validated()
        log.info("step %d: validation loss %.4f", scheduler.step, validation.loss)
        self.run_log.log_validation(scheduler, validation)
        return validation

    def make_up_validation(self) -> None:
        """The validation that a signal cut off before the present start; a resumed step has its checkpoint already.

        Afterwards the best value so far, and which checkpoint has it, are what they are in a run without signals.
        """
        scheduler = self.step_scheduler
        if not scheduler.validation_is_missing:
            return
        log.info("validating step %d, which a signal had prevented", scheduler.step)
        validation = self._validated()
        if validation is None:
            self.stop()
        self.saves.note_late_validation(self.losses(validation))

    def losses(self, validation: Validation | None) -> dict[str, Any]:
        """What losses.json holds of the present step; null where nothing was measured at this very step."""
        return {
            "step": self.step_scheduler.step,
            "epoch": self.step_scheduler.epoch,
            "train_loss": self.last_step.loss if self.last_step else None,
            "val_loss": validation.loss if validation else None,
        }

    # ---------------------------------------------------------------- end

    def acknowledge_stop(self, number: int) -> None:
        """Log that a signal was received and what follows; called by a thread while the step in progress goes on.

        The number is 0 if another rank received the signal.
        """
        name = signal.Signals(number).name if number else "a signal to another rank"
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        saves = (
            "saving"
            if self.checkpointer is not None
            else "nothing is saved, checkpoint.enabled is false"
        )
        code = self.stop_request.exit_code
        then = f"{saves}, then exit {code}" if code else f"{saves}, then exit"
        step = self.step_scheduler.stops_after
        self.run_log.progress.write_above(
            f"{name}: stopping after step {step} at the latest: {then}; {again} to stop now without saving"
        )

    def stop(self) -> NoReturn:
        """End for a signal: save the last completed step unless it is saved. Raises :class:`Stopped`."""
        scheduler = self.step_scheduler
        self.saves.stop(self.losses(None))
        saved = self.checkpointer is not None and scheduler.step > 0
        number = self.stop_request.requested
        by = signal.Signals(number).name if number else "a signal to another rank"
        raise Stopped(
            f"stopped by {by} after step {scheduler.step}"
            + (", which is saved" if saved else "; nothing was saved"),
            where=str(self.checkpointer.directory) if self.checkpointer else "",
            value=self.saves.last_save.path.name if self.saves.last_save else "",
            hint="the same command goes on from there" if saved else "the same command starts over",
        )

    def end(self) -> None:
        """The last lines of a run that ended by itself. Raises what made its last save fail, if it went on then."""
        self.saves.wait()
        scheduler = self.step_scheduler
        loss = f"training loss {self.last_step.loss:.4f}" if self.last_step else "no step was made"
        log.info("done: step %d, %s", scheduler.step, loss)
        log.info("%s", scheduler.reason_of_end())
        self.saves.end()

    def already_complete(self) -> None:
        """A finished run is started again: say so, and make the exports that a kill or a signal had prevented."""
        log.info(
            "already complete at step %d: %s",
            self.step_scheduler.step,
            self.step_scheduler.reason_of_end(),
        )
        self.saves.export_finished()

    def close(self) -> None:
        """Close the logs, the checkpointer and the process groups; safe after a failed or missing ``setup``."""
        self._resources.close()
