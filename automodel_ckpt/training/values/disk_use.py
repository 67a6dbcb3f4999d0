"""What a run will have on disk, from its cadence and its keep policy. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.units import counted, size_text
from automodel_ckpt.checkpoint.run.resume import checkpoint_names

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.saving.forecast import Forecast

log = logging.getLogger("automodel_ckpt")


def checkpoints_kept(
    config: Any, steps: int | None, steps_per_epoch: int | None, existing: Collection[int]
) -> tuple[int | None, int | None]:
    """About the largest number of checkpoints that are on disk at one time, and how many a run adds to the existing.

    Both are None where they cannot be known. A run adds at least one: an old checkpoint is removed only when a new one
    is there. *steps* is the length of the run, *existing* are the steps of the checkpoints that are there. Saves that
    validation or the clock decides on (``ckpt_on_best``, ``ckpt_every_minutes``, ``ckpt_every_steps: auto``) count only
    where ``keep_last`` limits them.
    """
    keep, scheduler = config.checkpoint, config.step_scheduler
    every = scheduler.ckpt_every_steps
    most: int | None = None
    if steps is not None:
        strides = [every] if isinstance(every, int) else []
        if scheduler.ckpt_every_epochs and steps_per_epoch:
            strides.append(scheduler.ckpt_every_epochs * steps_per_epoch)
        newest = max(existing, default=0)
        most = len(existing) + sum(steps // stride - newest // stride for stride in strides)
        most += steps > newest and all(steps % stride for stride in strides)
    if keep.keep_last is not None:
        num_milestones = len(keep.keep_steps)
        if keep.keep_every_steps and steps is not None:
            num_milestones += steps // keep.keep_every_steps
        # A new one is there before an old one goes.
        limit = max(int(keep.keep_last), 1) + int(keep.keep_best) + num_milestones + 1
        is_timed = scheduler.ckpt_every_minutes or every == "auto" or scheduler.ckpt_on_best
        most = limit if most is None or is_timed else min(most, limit)
        if keep.keep_every_steps and steps is None:
            most = None
    return most, None if most is None else max(most - len(existing), 1)


def warn_of_little_space(
    config: Any,
    forecast: Forecast,
    directory: Path,
    *,
    planned_steps: int | None,
    steps_per_epoch: int | None,
    exports_at_end: bool,
) -> None:
    """Warn if the disk of the run *directory* cannot hold all that the run will keep.

    *forecast* is the forecast of one checkpoint. *exports_at_end*: models are exported when the run ends, not for each
    checkpoint. Raises OSError if the directory cannot be read.
    """
    existing = [name.step for name in checkpoint_names(directory)]
    _, num_more = checkpoints_kept(config, planned_steps, steps_per_epoch, existing)
    num_more = num_more or 1
    num_exports = 0
    if forecast.export_bytes and exports_at_end:
        num_exports = 1 + config.checkpoint.export_best
    needed = num_more * forecast.nbytes + num_exports * forecast.export_bytes
    if needed <= forecast.free_bytes:
        return
    exports = ""
    if num_exports:
        exports = (
            f" and {counted(num_exports, 'export')} of about {size_text(forecast.export_bytes)}"
        )
    log.warning(
        "the disk of %s cannot hold what this run will save: %d more checkpoints of about %s%s take %s, and %s "
        "are free; free space, or keep fewer (checkpoint.keep_last, step_scheduler.ckpt_every_steps)",
        directory,
        num_more,
        size_text(forecast.nbytes),
        exports,
        size_text(needed),
        size_text(forecast.free_bytes),
    )
