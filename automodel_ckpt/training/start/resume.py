"""Load the newest checkpoint into the parts of a run, with the settings of its recipe or of this one."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint import Checkpointer, Manifest, Resumed
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.discovery import left_out
from automodel_ckpt.checkpoint.state.mismatch import first_lines
from automodel_ckpt.config.changes import (
    Change,
    change_lines,
    changed_keys,
    check_overrides,
    effective_recipe,
    ignored_by_resume,
    override_problem,
    recipe_of,
    saved_recipe,
)
from automodel_ckpt.config.keys.optimizer import OptimizerConfig, OptimizerTarget
from automodel_ckpt.config.tree.yaml_tree import DEFAULT
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.optim.build import current_rate
from automodel_ckpt.optim.lr import fast_forward, follow_schedule
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.parts.optimizers import optimizers_8bit
from automodel_ckpt.training.saves.saves import Saves
from automodel_ckpt.training.values.run_log import RunLog

if TYPE_CHECKING:
    from automodel_ckpt.training.saves.memory_saves import MemorySaves


log = logging.getLogger("automodel_ckpt")

OPTIMIZER = "optimizer"
SCHEDULE = "lr_scheduler"
"""Attributes of a recipe, as checkpoints name them."""


class RecipeComparison:
    """Compares the recipe of a checkpoint with the recipe of this start, which *recipe* has."""

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        self._on_resume: str = recipe.config.optimizer.on_resume
        schedule = recipe.lr_scheduler
        # The rates of LambdaLR are computed again with the recipe's function.
        self._keeps_schedule = schedule is not None and not isinstance(schedule, LambdaLR)
        self._changes: list[Change] = []

    def report(self, checkpoint: Path, manifest: Manifest) -> None:
        """Log which settings changed since *checkpoint* was saved, before it is loaded. Called on rank 0.

        Raises :class:`RecipeError` for overrides on the command line that the resume would ignore.
        """
        recipe = self._recipe
        saved_precision = manifest.environment.get("precision")
        if isinstance(saved_precision, str) and saved_precision != recipe.trainable.precision:
            # Defaults depend on the device, so that the recipes may be equal.
            log.warning(
                "the precision is not the same as for %s, which was trained with %s",
                checkpoint.name,
                ascii(saved_precision[:200]),
            )
        saved = saved_recipe(checkpoint / layout.CONFIG)
        if not saved or not recipe.config_yaml:
            return  # imported from another program, or run by a script without a recipe file
        given = {key for key, origin in recipe.origins.items() if origin != DEFAULT}
        self._changes = changed_keys(saved, recipe_of(recipe.config_yaml), given)
        ignored = self._ignored(manifest.saved)
        check_overrides(ignored, recipe.overridden, checkpoint)
        if self._changes:
            lines = change_lines(self._changes, ignored)
            message = "settings changed since %s was saved:%s"
            log.warning(message, checkpoint.name, first_lines(lines))

    def effective_recipe(self, resumed: Resumed, options: Values) -> str:
        """Return the recipe with the values that the run uses; on rank 0, which saves it.

        *options* are the values of optimizer options that continue as saved, by dotted key.
        """
        config_yaml: str = self._recipe.config_yaml
        # Not what the checkpoint has: state that was not loaded begins with the recipe's values.
        kept = self._ignored(resumed.loaded)
        if not config_yaml or not (kept or options):
            return config_yaml
        return effective_recipe(config_yaml, resumed.path / layout.CONFIG, kept, options)

    def _ignored(self, loaded: Collection[str]) -> list[Change]:
        return ignored_by_resume(
            self._changes, loaded, self._on_resume, keeps_schedule=self._keeps_schedule
        )


def log_omitted_state(recipe: object, untracked: Collection[str]) -> None:
    """Log which attributes of *recipe* have state that is not saved, and why."""
    omitted = dict(left_out(recipe))
    for name, why in omitted.items():
        log.debug("not saved, since %s: %s", why, name)
    for name in sorted(set(untracked) - omitted.keys()):
        log.warning("untracked names %r, but the recipe has no such attribute", name)


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that choose an implementation, and not what it computes."""
_KEPT = (
    "the %s%s continues as saved, %s; the recipe's %s is not applied "
    "(optimizer.on_resume: recipe applies it)"
)
_TAKEN = "the %s%s is the recipe's from here on, %s; it was %s"


class RecipeOptions:
    """The recipe's options of an optimizer and its *schedule* (None: a constant rate), to compare with a checkpoint's.

    Create it before a checkpoint is loaded into both. *section* is the recipe's section ``optimizer``: with its
    ``on_resume: recipe``, the recipe's options replace the saved ones. *overridden* are the keys that the command line
    gives.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        section: OptimizerConfig | OptimizerTarget,
        overridden: Collection[str] = (),
    ) -> None:
        self._section = section
        self._of_section: dict[str, list[Any]] = {}
        self._optimizer = optimizer
        self._schedule = schedule
        self._from_recipe = section.on_resume == "recipe"
        self._overridden = overridden
        self._rates = [] if schedule is None else list(schedule.base_lrs)
        self._8bit = optimizers_8bit(optimizer)
        self._state_options = [each.state_options for each in self._8bit]
        self._new_schedule = {} if schedule is None else copy.deepcopy(schedule.state_dict())
        self._checkpoint = Path()
        self._groups = self._present_groups()

    def compare(self, scheduler: StepScheduler, saved: Collection[str], checkpoint: Path) -> None:
        """Give the optimizer its options and its rate after *checkpoint* was loaded, and log what changes.

        *saved* are the names of the attributes with state in the checkpoint. Raises :class:`RecipeError` if the
        command line gives an option and the saved one is used instead. The checkpoint's config.yaml does not show
        that: it is the recipe of its run, which may have used other options after an earlier resume.
        """
        self._checkpoint = checkpoint
        saved_rate = current_rate(self._optimizer)
        if OPTIMIZER in saved:
            # The rate of a schedule that is left out is replaced by the recipe's.
            has_lost_schedule = self._schedule is None and SCHEDULE in saved
            for name, where, loaded, new in self._options(has_lost_schedule=has_lost_schedule):
                self._choose(name, f"optimizer's {name}", where, loaded, new)
            for optimizer, of_recipe in zip(self._8bit, self._state_options, strict=True):
                saved_options = optimizer.state_options
                optimizer.set_state_options(**(of_recipe if self._from_recipe else saved_options))
                if saved_options != of_recipe:
                    # The log has the summary of the state that the recipe describes.
                    log.debug("%s: %s", type(optimizer).__name__, optimizer.state_summary)
        if self._from_recipe:
            self._restore()
        if self._schedule is not None and SCHEDULE in saved:
            self._follow(self._schedule, scheduler, saved_rate)
        elif self._schedule is not None or SCHEDULE in saved:
            # The rate of a schedule that is left out may be 0.0.
            self._restore(("lr", "initial_lr"))
            what = "the checkpoint's schedule is left out"
            if self._schedule is not None:
                what = "no schedule was loaded"
                fast_forward(self._schedule, scheduler.step)
            now = current_rate(self._optimizer)
            message = "%s: the learning rate of step %d is the recipe's, %.6g; it was %.6g"
            log.warning(message, what, scheduler.step + 1, now, saved_rate)

    @property
    def kept(self) -> ValueDict:
        """The options of the section that continue as saved in all its groups, by dotted key of the recipe."""
        return {
            f"{OPTIMIZER}.{name}": values[0][0] if len(values[0]) == 1 else values[0]
            for name, values in self._of_section.items()
            if values.count(values[0]) == len(values) and values[0] != self._in_section(name)
        }

    def _in_section(self, name: str) -> list[float]:
        arguments = getattr(self._section, "kwargs", {})
        return _numbers(getattr(self._section, name, arguments.get(name)))

    def _present_groups(self) -> list[ValueDict]:
        """The options of each group."""
        groups = self._optimizer.param_groups
        return [{name: group[name] for name in group if name != "params"} for group in groups]

    def _scheduled_options(self) -> tuple[str, ...]:
        """Options that a schedule sets in each step. Without a schedule there are none."""
        if self._schedule is None:
            return ()
        # OneCycleLR moves the momentum, too.
        is_cycle = getattr(self._schedule, "cycle_momentum", False)
        return ("lr", "initial_lr", *(("betas", "momentum") if is_cycle else ()))

    def _options(
        self, *, has_lost_schedule: bool
    ) -> Iterator[tuple[str, str, list[Any], list[Any]]]:
        """Yield (name, group in words, loaded value, the recipe's value) of each option of the state and the groups."""
        for optimizer, of_recipe in zip(self._8bit, self._state_options, strict=True):
            for name, new in of_recipe.items():
                yield name, "", [optimizer.state_options[name]], [new]
        ignored = {*self._scheduled_options(), *_IMPLEMENTATION}
        if has_lost_schedule:
            ignored |= {"lr", "initial_lr"}
        pairs = zip(self._groups, self._present_groups(), strict=False)
        for number, (of_group, loaded) in enumerate(pairs):
            where = self._in_words(number)
            for name, value in of_group.items():
                new_values, saved = _numbers(value), _numbers(loaded.get(name, ()))
                if new_values and saved and name not in ignored:
                    yield name, where, saved, new_values

    def _in_words(self, number: int) -> str:
        return f" of parameter group {number}" if len(self._groups) > 1 else ""

    def _choose(self, name: str, label: str, where: str, saved: list[Any], new: list[Any]) -> None:
        """Log which of two values of the option *name* is used from here on."""
        if self._from_recipe:
            if new != saved:
                log.warning(_TAKEN, label, where, _as_text(new), _as_text(saved))
            return
        if self._in_section(name) == new:
            self._of_section.setdefault(name, []).append(saved)
        if new != saved:
            # With an override of 0, no group would have weight decay. Otherwise it is by optimizer.no_decay.
            is_without_decay = name == "weight_decay" and new == [0.0]
            if not is_without_decay or not any(group.get(name) for group in self._groups):
                self._check_override(name, saved, new)
            log.warning(_KEPT, label, where, _as_text(saved), _as_text(new))

    def _check_override(self, name: str, saved: list[Any], new: list[Any]) -> None:
        """Raise :class:`RecipeError` if the command line gives the option *name*, and the resume ignores it."""
        for key in self._overridden:
            is_option = key.startswith(f"{OPTIMIZER}.") and key.endswith(f".{name}")
            if is_option or key == OPTIMIZER:
                changed = key if is_option else f"{OPTIMIZER}.{name}"
                change = Change(changed, _as_text(saved), _as_text(new))
                raise RecipeError.all_of([override_problem(key, change, self._checkpoint)])

    def _restore(self, names: Collection[str] | None = None) -> None:
        """Set the options *names*, by default all, that the recipe built. A schedule changes its rates in place."""
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in options if names is None else names:
                if name in options:
                    group[name] = options[name]
                else:
                    group.pop(name, None)

    def _follow(self, schedule: LRScheduler, scheduler: StepScheduler, saved_rate: float) -> None:
        """Set the rates of *schedule* at the present step, and log if the next step's rate is not *saved_rate*."""
        for number, rates in enumerate(zip(schedule.base_lrs, self._rates, strict=True)):
            loaded, new = rates
            self._choose("lr", "peak learning rate", self._in_words(number), [loaded], [new])
        if self._from_recipe:
            schedule.base_lrs = list(self._rates)
        if isinstance(schedule, LambdaLR):
            # Its rates are a function of the step alone, so they can be computed again.
            follow_schedule(schedule)
        elif self._from_recipe:
            # A schedule computes a rate from the one before it: the saved rates belong to other settings.
            self._restore(self._scheduled_options())
            schedule.load_state_dict(copy.deepcopy(self._new_schedule))
            fast_forward(schedule, scheduler.step)
        now = current_rate(self._optimizer)
        if now != saved_rate and not scheduler.is_finished():
            why = ""
            before, planned = scheduler.planned_before, scheduler.planned_steps
            # An imported run was planned by another program, which may not state it.
            if before is not None and before != planned and not self._from_recipe:
                why = f" (the run was planned for {counted(before, 'step')}, now for {planned})"
            message = "the schedule changed%s: the learning rate of step %d is %.6g, it would have been %.6g"
            log.warning(message, why, scheduler.step + 1, now, saved_rate)


def _numbers(value: Any) -> list[float]:
    """A number or a switch, or several, as a list. Empty for anything else."""
    values = value if isinstance(value, tuple | list) else [value]
    # bool is a subclass of int.
    return list(values) if all(isinstance(each, int | float) for each in values) else []


def _as_text(numbers: list[Any]) -> str:
    return str(numbers[0] if len(numbers) == 1 else numbers)


def _continue_imported_run(resumed: Resumed, recipe: Any) -> None:
    """Set in *recipe*'s parts what an imported checkpoint has no state for, and log what was not transferred.

    The position in the data follows from the steps and samples that the other program counted. Random numbers are
    drawn from a generator that the seed and the step determine.
    """
    manifest = resumed.manifest
    log.info(
        "continuing the run of another program (%s) after step %d",
        manifest.lineage.get("imported_kind"),
        resumed.step,
    )
    missing = manifest.lineage.get("not_transferred")
    if isinstance(missing, list) and missing:
        log.warning("the import did not transfer:%s", first_lines([str(item) for item in missing]))
    recipe.rng.derive(resumed.step)
    dataloader = recipe.dataloader
    if isinstance(dataloader, GlobalBatchLoader):
        consumed = manifest.progress.get("consumed_samples")
        dataloader.start_after(resumed.step, consumed)
        # The other program may count both in another way.
        recipe.step_scheduler.epochs_done = dataloader.epoch
        recipe.step_scheduler.consumed_samples = dataloader.samples_before


def load_checkpoint(recipe: Any, state: Values) -> None:
    """Load the newest usable checkpoint into *state*, and prepare the saves and the logs for the next step. Collective.

    *recipe* has the parts of the run and a checkpointer. Without a checkpoint, the run begins. Raises
    :class:`CheckpointUnusable` if none can be used, and :class:`RecipeError` for state that cannot be saved and for
    changes of the recipe that a resume does not allow.
    """
    checkpointer: Checkpointer = recipe.checkpointer
    scheduler: StepScheduler = recipe.step_scheduler
    saves: Saves = recipe.saves
    memory: MemorySaves | None = recipe.memory
    run_log: RunLog = recipe.run_log
    checkpointer.check(state)
    # Made before the checkpoint's options are loaded into the optimizer: it records the recipe's options.
    recipe_options = RecipeOptions(
        recipe.optimizer, recipe.lr_scheduler, recipe.config.optimizer, recipe.overridden
    )
    comparison = RecipeComparison(recipe)
    resumed = checkpointer.load(state, before_loading=comparison.report)
    saves.resumed = resumed
    if resumed is None and checkpointer.is_rank0:
        _warn_of_other_checkpoints(checkpointer.directory)
    if memory is not None:
        if resumed is not None and resumed.in_memory:
            # A stop must save this step on disk.
            scheduler.note_lost_save()
            log.info("step %d was loaded from memory%s", resumed.step, memory.origins())
        memory.start(resumed, scheduler.step)
        saves.memory = memory
    run_log.open(checkpointer.directory, checkpointer.run.check_lease)
    if resumed is not None:
        # Wall-clock time: the checkpoint may be from another process or node.
        run_log.progress.note_saved(resumed.step, time.time() - resumed.manifest.created)
        if resumed.manifest.is_imported_run:
            _continue_imported_run(resumed, recipe)
        # After the load: an earlier resume may have kept options that no recipe shows.
        recipe_options.compare(scheduler, resumed.loaded, resumed.path)
        saves.recipe_yaml = comparison.effective_recipe(resumed, recipe_options.kept)
    saves.check_space(state)
    if not scheduler.is_finished():
        checkpointer.prepare(state)
    # Only now is the step known to which the logs are truncated.
    run_log.resume(scheduler, resumed.path.name if resumed is not None else None)
    saves.make_missing_export()


def check_own(restore_from: str | None) -> None:
    """Raise :class:`CheckpointUnusable` if ``checkpoint.restore_from`` is a path with files of another program."""
    path = Path(restore_from or "").expanduser()
    is_ours = layout.parse_checkpoint_name(path.name) or os.path.lexists(path / layout.MANIFEST)
    if restore_from is None or "://" in restore_from or is_ours or not path.is_dir():
        return
    from automodel_ckpt.convert.formats.registry import detect

    known = detect(path)
    if known is not None:
        raise CheckpointUnusable(
            f"this is a checkpoint of another program: {known.name}",
            where="checkpoint.restore_from",
            value=str(path),
            hint="import it (`ckpt import DIRECTORY RUN`, with --training-state to continue its run), and name RUN in "
            "checkpoint.checkpoint_dir; or start from its weights with init_from.path",
        )


def _warn_of_other_checkpoints(run: Path) -> None:
    """Log a warning about checkpoints of another program in the directory of a run that begins."""
    if all(name.startswith(".") for name in os.listdir(run)):
        return  # without importing the readers of other programs' files
    from automodel_ckpt.convert.formats.registry import detect
    from automodel_ckpt.convert.imports.external import named_checkpoints

    with suppress(OSError):
        for found in (run, *named_checkpoints(run)):
            known = detect(found, readable_only=True)
            if known is None or layout.parse_checkpoint_name(found.name):
                continue
            log.warning(
                "a new run begins, although checkpoint.checkpoint_dir has a checkpoint of another program (%s): %s\n"
                "    to continue from it, import it into another directory (`ckpt import`, with --training-state to "
                "continue its run); for a new run, name another checkpoint.checkpoint_dir",
                known.name,
                found,
            )
            return
