"""The time that a run needs to save and stop after a signal: from its logs, or from the size of its checkpoints."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.hub_access import without_token
from automodel_ckpt.base.units import size_text
from automodel_ckpt.base.user_code import reporting_user_failures
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.logs.log_records import read_records
from automodel_ckpt.parallel.mesh_sizes import Sizes

SAVE_BYTES_PER_SECOND = 500e6
"""Assumed rate of a node that writes to shared storage, if no save was measured."""
UNKNOWN_SECONDS = 300
_UNKNOWN_STEP_SECONDS = 30.0
_SLACK_SECONDS = 30
_MIN_SECONDS = 120
_ROUNDED_TO = 30
_NUM_SAVES = 20
_NUM_STEPS = 200


@dataclass(frozen=True, slots=True)
class StopTime:
    """*seconds* that a run needs at most from a signal to its end, and the *reason*, as a sentence."""

    seconds: int
    reason: str


def stop_time(loaded: LoadedRecipe, flags: LaunchFlags, sizes: Sizes, num_nodes: int) -> StopTime:
    """Return the time from a signal to the end of a run.

    A signal is answered after the current step. A save may have to wait for an earlier one in the background. The time
    is therefore twice that of a step and a save, plus 30 s, and at least 120 s. If checkpoints are uploaded, it is also
    at least ``checkpoint.remote.wait_after_signal_seconds`` plus 30 s. Step and save are measured if the run directory
    has a log; otherwise, the size of a checkpoint is computed, which imports torch and reads the model's
    config. If that fails, for example because the model is not on this machine, the time is 300 s.
    """
    if not loaded.config.checkpoint.enabled:
        return StopTime(_MIN_SECONDS, "the run saves no checkpoints")
    least = _MIN_SECONDS
    remote = with_local_directory(loaded.config).checkpoint.remote
    if remote is not None:
        least = max(least, math.ceil(remote.wait_after_signal_seconds) + _SLACK_SECONDS)
    log = Path(with_local_directory(loaded.config).checkpoint.checkpoint_dir) / "training.jsonl"
    measured = _measured(log)
    if measured is not None:
        step, save = measured
        found = (
            f"measured: a step takes {step:.3g} s, and the longest save took {save:.3g} s ({log})"
        )
        return StopTime(_rounded(2 * (step + save) + _SLACK_SECONDS, least), found)
    nbytes = _checkpoint_bytes(loaded, flags, sizes)
    if nbytes is None:
        reason = (
            "a guess, because no save was measured and the size of a checkpoint is unknown here"
        )
        return StopTime(_rounded(UNKNOWN_SECONDS, least), reason)
    save = nbytes / (SAVE_BYTES_PER_SECOND * num_nodes)
    rate = f"{size_text(SAVE_BYTES_PER_SECOND)}/s per node"
    reason = f"estimated from a checkpoint of {size_text(nbytes)}, written at {rate}"
    return StopTime(_rounded(2 * (_UNKNOWN_STEP_SECONDS + save) + _SLACK_SECONDS, least), reason)


def _rounded(seconds: float, least: int) -> int:
    return math.ceil(max(seconds, least) / _ROUNDED_TO) * _ROUNDED_TO


def _measured(log: Path) -> tuple[float, float] | None:
    """Return the median time of a step and the longest of the newest saves, in seconds; None if the log has no save."""
    saves: list[float] = []
    times: list[tuple[int, float]] = []
    try:
        for record in read_records(log):
            seconds, timestamp = record.get("total_seconds"), record.get("timestamp")
            if record.get("event") == "save" and isinstance(seconds, int | float):
                saves.append(float(seconds))
            elif "event" not in record and isinstance(timestamp, int | float):
                times.append((record["step"], float(timestamp)))
    except AutomodelError:
        return None
    if not saves:
        return None
    steps = [
        later - earlier
        for (before, earlier), (step, later) in itertools.pairwise(times[-_NUM_STEPS:])
        if step == before + 1 and later >= earlier
    ]
    step_seconds = statistics.median(steps) if steps else _UNKNOWN_STEP_SECONDS
    return step_seconds, max(saves[-_NUM_SAVES:])


def _checkpoint_bytes(loaded: LoadedRecipe, flags: LaunchFlags, sizes: Sizes) -> int | None:
    """Return the size of a checkpoint by the forecast of a dry run; None if the model or the data are not here."""
    from automodel_ckpt.config.callables.prepare import prepare
    from automodel_ckpt.config.callables.trust import Trust
    from automodel_ckpt.training.forecast.plan import plan
    from automodel_ckpt.training.recipe import Recipe

    try:
        with without_token(), reporting_user_failures(RecipeError):
            loaded, recipe_class = prepare(loaded, Trust(flags.trust))
            if not issubclass(recipe_class, Recipe):
                return None
            recipe = recipe_class(loaded.config, config_yaml=loaded.to_yaml())
            return plan(recipe, sizes).checkpoint_bytes
    except (AutomodelError, OSError):
        return None
