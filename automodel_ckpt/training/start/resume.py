"""Loading the newest checkpoint into the parts of a run, and preparing these for the step to continue from."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint import Checkpointer, Resumed
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.state.mismatch import first_lines
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.saves.saves import Saves
from automodel_ckpt.training.start.resume_overrides import RecipeComparison, RecipeOptions
from automodel_ckpt.training.values.run_log import RunLog

if TYPE_CHECKING:
    from automodel_ckpt.training.saves.memory_saves import MemorySaves

log = logging.getLogger("automodel_ckpt")


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


def load_checkpoint(recipe: Any, state: Mapping[str, Any]) -> None:
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
