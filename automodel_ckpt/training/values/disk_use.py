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


def kept_at_once(
    config: Any, steps: int | None, steps_per_epoch: int | None, existing: Collection[int] = ()
) -> int | None:
    """About the largest number of checkpoints that are on disk at one time; None where that cannot be known.

    *steps* is the length of the run, *existing* are the steps of the checkpoints that are there. Saves that validation
    or the clock decides on (``ckpt_on_best``, ``ckpt_every_minutes``, ``ckpt_every_steps: auto``) count only where
    ``keep_last`` limits them.
    """
    keep, scheduler = config.checkpoint, config.step_scheduler
    saved = None if steps is None else _num_saved(scheduler, steps, steps_per_epoch, existing)
    if keep.keep_last is None:
        return saved
    num_milestones = len(keep.keep_steps)
    if keep.keep_every_steps:
        if steps is None:
            return None
        num_milestones += steps // keep.keep_every_steps
    # A new one is there before an old one goes.
    limit = max(int(keep.keep_last), 1) + int(keep.keep_best) + num_milestones + 1
    is_timed = scheduler.ckpt_every_minutes or scheduler.ckpt_every_steps == "auto"
    if saved is None or is_timed or scheduler.ckpt_on_best:
        return limit
    return min(saved, limit)


def _num_saved(
    scheduler: Any, steps: int, steps_per_epoch: int | None, existing: Collection[int]
) -> int:
    """The existing checkpoints, and those that are to come by count, the last step included."""
    strides = []
    if isinstance(scheduler.ckpt_every_steps, int):
        strides.append(scheduler.ckpt_every_steps)
    if scheduler.ckpt_every_epochs and steps_per_epoch:
        strides.append(scheduler.ckpt_every_epochs * steps_per_epoch)
    newest = max(existing, default=0)
    num_more = sum(steps // stride - newest // stride for stride in strides)
    is_last_extra = steps > newest and all(steps % stride for stride in strides)
    return len(existing) + num_more + is_last_extra


def still_to_come(
    config: Any, steps: int | None, steps_per_epoch: int | None, existing: Collection[int]
) -> int | None:
    """The largest number of checkpoints that a run adds to the *existing* ones; None where that cannot be known.

    It is at least one: an old checkpoint is removed only when a new one is there.
    """
    most = kept_at_once(config, steps, steps_per_epoch, existing)
    return None if most is None else max(most - len(existing), 1)


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

    *forecast* is that of one checkpoint. *exports_at_end*: models are exported when the run ends, not for each
    checkpoint. Raises OSError if the directory cannot be read.
    """
    existing = [name.step for name in checkpoint_names(directory)]
    num_more = still_to_come(config, planned_steps, steps_per_epoch, existing) or 1
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
