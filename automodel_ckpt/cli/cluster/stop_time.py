"""The time that a run needs to save and stop after a signal, from its logs."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.errors import AutomodelError
from automodel_ckpt.logs.log_records import read_records

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


def stop_time(loaded: LoadedRecipe) -> StopTime:
    """Return the time from a signal to the end of a run.

    A signal is answered after the current step. A save may have to wait for an earlier one in the background. The time
    is therefore twice the time of a step and a save, plus 30 s, and at least 120 s. If checkpoints are uploaded, it is
    also at least ``checkpoint.remote.wait_after_signal_seconds`` plus 30 s. Without a log in the run directory, it is
    300 s.
    """
    section = with_local_directory(loaded.config).checkpoint
    if not section.enabled:
        return StopTime(_MIN_SECONDS, "the run saves no checkpoints")
    least = _MIN_SECONDS
    if section.remote is not None:
        least = max(least, math.ceil(section.remote.wait_after_signal_seconds) + _SLACK_SECONDS)
    log = Path(section.checkpoint_dir) / "training.jsonl"
    measured = _measured(log)
    if measured is None:
        reason = "a guess, because no save was measured: write this launcher again after a save"
        return StopTime(_rounded(UNKNOWN_SECONDS, least), reason)
    step, save = measured
    found = f"measured: a step takes {step:.3g} s, and the longest save took {save:.3g} s ({log})"
    return StopTime(_rounded(2 * (step + save) + _SLACK_SECONDS, least), found)


def _rounded(seconds: float, least: int) -> int:
    return math.ceil(max(seconds, least) / _ROUNDED_TO) * _ROUNDED_TO


def _measured(log: Path) -> tuple[float, float] | None:
    """Return the median time of a step and the longest of the newest saves, in seconds.

    Returns None when the log has no save.
    """
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
