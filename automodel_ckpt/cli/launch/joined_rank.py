"""Run a rank that torchrun or srun started."""

from __future__ import annotations

import time
from collections.abc import Callable

from automodel_ckpt.cli.launch.failures import FailureRecord, printed_failure
from automodel_ckpt.cli.launch.process import print_message, this_rank, world_size
from automodel_ckpt.cli.launch.worker import Loaded, RecipeClass, run_rank
from automodel_ckpt.distributed import hang_action

SECONDARY_DELAY_SECONDS = 1.0
"""How long a rank whose failure followed from another one's waits, so that the other one reports first."""


def joined_rank(
    loaded: Loaded,
    recipe_class: RecipeClass,
    is_first_to_report: Callable[[], bool],
    exit_stopped: int,
) -> int:
    """Run a rank that torchrun or srun started, and return its exit code.

    A rank prints its own failure if *is_first_to_report* returns True. All ranks of a run stop together after a save,
    so then rank 0 prints the message without asking the others.
    """

    def on_failure(record: FailureRecord) -> None:
        if not record.primary:
            time.sleep(SECONDARY_DELAY_SECONDS)
        is_reporter = this_rank() == 0 if record.stopped_in_training else is_first_to_report()
        if is_reporter:
            print_message(printed_failure(record, several_ranks=world_size() > 1))

    with hang_action.ending_processes():
        return run_rank(loaded, recipe_class, on_failure, exit_stopped)
