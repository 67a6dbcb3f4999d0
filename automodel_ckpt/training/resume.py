"""What a run continues with: the newest checkpoint, and the settings and commits of the Hub that it records."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from automodel_ckpt.base.hub_access import (
    MAIN,
    Kind,
    chain_of,
    check_access,
    go_offline,
    is_commit,
    is_hub_name,
    resolve_commit,
)
from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint import Checkpointer, Manifest, Resumed
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run.links import own_name
from automodel_ckpt.checkpoint.run.resume import expected
from automodel_ckpt.checkpoint.state.mismatch import first_lines
from automodel_ckpt.config.callables.plugins import callable_of, signature_of
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
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.config.tree.yaml_tree import DEFAULT
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.repository import require_local
from automodel_ckpt.optim.build import current_rate, fast_forward, follow_schedule
from automodel_ckpt.parallel.ranks.agree import broadcast_object, raise_on_all_ranks
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
                options = of_recipe if self._from_recipe else optimizer.state_options
                optimizer.set_state_options(**options)
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


_OWN_DATA = "automodel_ckpt.data."
_FROM_PRETRAINED = ("transformers.", ".from_pretrained")


@dataclass(frozen=True)
class HubName:
    """A repository that a recipe names at the key *where*. Among the *values* of a section, *revision_key* is its
    revision.

    *is_optional*: a run that continues from a checkpoint does not read it.
    """

    name: str
    where: str
    values: ValueDict
    revision_key: str = "revision"
    kind: Kind = "model"
    is_optional: bool = False

    @property
    def revision(self) -> str | None:
        """The branch, tag or commit that the recipe asks for."""
        return self.values.get(self.revision_key)

    @property
    def asked(self) -> str:
        """The name and the revision that the recipe asks for, as :data:`FURTHER` has them."""
        owner = _DATA if self.kind == "dataset" else ""
        return f"{owner}{self.name}@{self.revision or MAIN}"


_NAMES = {
    "from_pretrained": "revision",
    "from_config": "revision",
    "path": "revision",
    "reference": "reference_revision",
}
"""The keys of sections that name a repository, and the keys of its revision."""


def hub_names(config: Any) -> Iterator[HubName]:
    """Yield the names in a recipe that may name repositories, the model first. Paths are among them."""
    names = sorted(_names_in(config, ""), key=lambda name: not name.where.startswith("model."))
    of_model = [name.name for name in names if name.where in _MODEL_KEYS]
    for name in names:
        is_preprocessor = name.where.startswith(("tokenizer.", "processor."))
        # The model's own one follows model.revision.
        if not is_preprocessor or name.revision is not None or name.name not in of_model:
            yield name


def _names_in(value: Any, where: str) -> Iterator[HubName]:
    """Yield the names in a section and in the arguments of ``_target_`` sections, at any depth."""
    items: Any = ()
    if isinstance(value, Target):
        yield from _of_target(value, where)
        items = value.kwargs.items()
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value):
        fields = vars(value)
        items = fields.items()
        for key, revision_key in _NAMES.items():
            name = fields.get(key)
            # A config can be written in the recipe, too.
            if isinstance(name, str) and revision_key in fields and not is_url(name):
                is_optional = where.startswith("init_from")
                yield HubName(name, f"{where}{key}", fields, revision_key, is_optional=is_optional)
    for key, item in items:
        yield from _names_in(item, f"{where}{key}.")


def _of_target(target: Target, where: str) -> Iterator[HubName]:
    function, given = target._target_, target.kwargs
    start, end = _FROM_PRETRAINED
    kind: Kind = "dataset"
    if function.startswith(start) and function.endswith(end):
        key, kind = "pretrained_model_name_or_path", "model"
    elif function == "datasets.load_dataset":
        # Names without an owner, such as json, are readers of files.
        key = "path" if "/" in str(given.get("path")) else ""
    elif function.startswith(_OWN_DATA):
        key = "path" if signature_of(callable_of(target)).accepts("revision") else ""
    else:
        return
    name, revision = given.get(key), given.get("revision")
    is_name = isinstance(name, str) and isinstance(revision, str | None) and not is_url(name)
    if is_name and kind == "dataset":
        # A missing train.jsonl is a mistake in a path.
        is_name = not Source.of(str(name)).is_file
    if is_name and is_repository(str(name)):
        yield HubName(str(name), f"{where}{key}", given, kind=kind)


def is_repository(name: str) -> bool:
    """Whether *name* can be the name of a repository, and is not a path in a local directory."""
    is_in_local_directory = "/" in name and Path(name).expanduser().parent.is_dir()
    return is_hub_name(name) and not is_in_local_directory


COMMIT, REVISION = "base_commit", "base_revision"
"""Notes in a manifest's ``environment``: NAME@COMMIT, and the revision that the recipe asked for."""
FURTHER = "hub_commits"
"""Note about other names: NAME@REVISION=COMMIT, with a comma between them. Names of data sets follow datasets/."""
_DATA = "datasets/"
_MODEL_KEYS = ("model.from_pretrained", "model.from_config")

Recorded = Texts
"""NAME@REVISION -> commit, as :data:`FURTHER` has them."""


def pin_base(
    config: RecipeConfig,
    checkpointer: Checkpointer | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    recorded: Recorded | None = None,
) -> RecipeConfig:
    """Return *config* with the commits of all names of the Hub as their revisions, and check the access to them.

    They are those that the checkpoint to resume from records, if its recipe asked for the same revisions. Without a
    *checkpointer*, they are those in *recorded*. What is in a local directory has none.

    Collective: rank 0 makes the requests. Raises :class:`RecipeError` on all ranks if something cannot be read, and
    states what to do.
    """
    config = copy.deepcopy(config)
    commits: TextDict = {}
    notes: TextDict = {}
    is_offline = False
    with raise_on_all_ranks(group):
        if group is None or dist.get_rank(group) == 0:
            if checkpointer is not None:
                recorded = recorded_commits(checkpointer.transfers.expected())
            commits, notes = _commits(config, recorded)
            from huggingface_hub import constants

            is_offline = bool(constants.HF_HUB_OFFLINE)
    commits, notes, is_offline = broadcast_object(group, (commits, notes, is_offline))
    if is_offline:
        go_offline("the Hub cannot be reached")
    if checkpointer is not None:
        checkpointer.notes.update(notes)
    for name in [name for name in hub_names(config) if name.where in commits]:
        name.values[name.revision_key] = commits[name.where]
    return config


def commits_of_run(config: RecipeConfig) -> Recorded | None:
    """Return the commits that a dry run expects the run to continue with. Returns None in a new run.

    They are recorded in the checkpoint to resume from, if it is on this machine.
    """
    section = with_local_directory(config).checkpoint
    if not section.enabled:
        return None
    root = Path(section.checkpoint_dir).absolute()
    memory = None
    if section.memory is not None:
        from automodel_ckpt.checkpoint.memory.directory import memory_of

        memory = memory_of(root, Path(section.memory.directory))
    restore_from = own_name(section.restore_from, section.remote)
    return recorded_commits(expected(root, restore_from, memory))


def recorded_commits(summary: Summary | None) -> Recorded | None:
    """Return the commits that a checkpoint to resume from records. Returns None without one."""
    if summary is None:
        return None
    environment = summary.environment
    recorded = {}
    for entry in str(environment.get(FURTHER, "")).split(", "):
        name, _, commit = entry.partition("=")
        recorded[name] = commit
    base, _, commit = str(environment.get(COMMIT, "")).partition("@")
    recorded[f"{base}@{environment.get(REVISION)}"] = commit
    return {name: commit for name, commit in recorded.items() if is_commit(commit)}


def _commits(config: RecipeConfig, recorded: Recorded | None) -> tuple[TextDict, TextDict]:
    """Determine the commits of all names, by their keys in the recipe, and the notes about them."""
    commits: TextDict = {}
    notes: TextDict = {}
    further: TextDict = {}
    for name in hub_names(config):
        if not is_repository(name.name):
            continue
        if name.kind == "model":
            # A path that does not exist is an error.
            require_local(name.name, name.where)
        asked = name.asked
        commit = further.get(asked) or _commit_of(name, recorded)
        if commit is None:
            continue
        commits[name.where] = commit
        is_base = name.where in _MODEL_KEYS
        if is_base:
            notes |= {COMMIT: f"{name.name}@{commit}", REVISION: name.revision or MAIN}
        if asked not in further:
            origin = " (recorded in the checkpoint)" if recorded and asked in recorded else ""
            label = "base model" if is_base else name.where
            log.debug("%s: %s at commit %s%s", label, name.name, commit[:12], origin)
        further[asked] = commit
    if further:
        notes[FURTHER] = ", ".join(f"{asked}={commit}" for asked, commit in further.items())
    return commits, notes


def _commit_of(name: HubName, recorded: Recorded | None) -> str | None:
    """Return the commit of a repository. Returns None when it is unknown."""
    commit = None if recorded is None else recorded.get(name.asked)
    if commit is not None and name.is_optional:
        # This start does not read it, and must not fail if it is gone.
        return commit
    try:
        if name.kind == "model":
            return resolve_commit(name.name, commit or name.revision, where=name.where)
        found = check_access(name.name, commit or name.revision, where=name.where)
    except RecipeError as error:
        from huggingface_hub.errors import RevisionNotFoundError

        is_gone = any(isinstance(each, RevisionNotFoundError) for each in chain_of(error))
        if commit is None or not is_gone:
            raise
        section, _, _ = name.where.rpartition(".")
        raise RecipeError(
            "the Hub no longer has the commit that the checkpoint records",
            where=name.where,
            value=f"{name.name}@{commit}",
            hint=f"to continue with other files, set {section}.{name.revision_key} to a commit that is there",
        ) from error
    return commit or found
