"""What follows the load of a run that another program started: the position in the data, and new random numbers."""

from __future__ import annotations

import logging

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint.loader import Resumed
from automodel_ckpt.checkpoint.state.mismatch import first_lines
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.training.counters.step_scheduler import StepScheduler

log = logging.getLogger("automodel_ckpt")


def continue_imported_run(
    resumed: Resumed,
    *,
    dataloader: object,
    step_scheduler: StepScheduler,
    rng: StatefulRNG,
) -> None:
    """Set what an imported checkpoint has no state for, and log what was not transferred.

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
    rng.derive(resumed.step)
    if isinstance(dataloader, GlobalBatchLoader):
        consumed = manifest.progress.get("consumed_samples")
        dataloader.start_after(resumed.step, consumed)
        step_scheduler.follow_data(
            epochs_done=dataloader.epoch, num_samples=dataloader.samples_before
        )
