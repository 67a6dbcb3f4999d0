"""Run a rank that torchrun or srun started, in this process.

Each rank is a separate command, and no launcher of this package sees them all.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from automodel_ckpt.cli.launch.failures import FailureRecord, printed_failure
from automodel_ckpt.cli.launch.process import print_message, this_rank, world_size
from automodel_ckpt.cli.launch.recipe_import import Prepare, configure_torch, import_recipe
from automodel_ckpt.cli.launch.worker import keep_memory, run_rank
from automodel_ckpt.errors import (
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_STOPPED,
    AutomodelError,
    RecipeError,
    describe,
)
from automodel_ckpt.logs.start_time import note_process_start
from automodel_ckpt.parallel.ranks import hang_action
from automodel_ckpt.parallel.ranks.network import is_known
from automodel_ckpt.parallel.ranks.stop import stop_request

TORCHRUN_GRACE_SECONDS = 20.0
"""torchrun kills its ranks 30 seconds after it has passed a signal on to them. They also have to close."""


def run_joined(prepare: Prepare, *, serve: bool) -> int:
    """Run the rank of this process, and return its exit code. With *serve* (srun), rank 0 serves the ranks' store."""
    stop_request().install()
    configure_torch(os.environ)
    store = _serve_store() if serve else None
    # torchrun distinguishes only success and failure, and a rank that saved because of a signal did not fail.
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and not serve
    exit_stopped = EXIT_DONE if is_under_torchrun else EXIT_STOPPED
    if is_under_torchrun:
        stop_request().grace_seconds = TORCHRUN_GRACE_SECONDS
    try:
        loaded, recipe_class = import_recipe(prepare)
        note_process_start(os.getpid())
    except AutomodelError as error:
        # All ranks of a node raise it. Under srun, LOCAL_RANK is 0 in each task that sees its own GPU alone.
        if os.environ.get("SLURM_LOCALID" if serve else "LOCAL_RANK", "0") == "0":
            print_message(describe(error)[1])
        code = error.exit_code
    else:
        with hang_action.ending_processes():
            code = run_rank(loaded, recipe_class, _report, exit_stopped)
        # All ranks of a node get here as they end, unless a restart follows. The one that owned the memory does the
        # work, or, if it was killed, another one. If all are killed, the memory is kept for the next start. torchrun's
        # agent kills the one that copies 30 seconds after another rank has failed; the memory is then kept, too. No
        # process is left to continue the copy: it would own the run directory when the next start needs it.
        if not hang_action.has_restarts_left(os.environ):
            keep_memory(loaded, code, by_rank=True)
    # The store is served until here.
    del store
    return exit_stopped if code == EXIT_STOPPED else code


def _report(record: FailureRecord) -> None:
    """Print the failure of this rank, unless another rank prints it: the one where it began.

    That one may have been killed: then rank 0 prints that it lost its connection. All ranks stop together after a
    save, and rank 0 prints that.
    """
    is_reporter = record.primary and not record.stopped_in_training
    if this_rank() == 0:
        is_reporter = record.primary or record.code == EXIT_INTERNAL
    if is_reporter:
        print_message(printed_failure(record, several_ranks=world_size() > 1))


def _serve_store() -> Any:
    """Serve the ranks' store on rank 0 under srun, as torchrun's agent does; return None on other ranks."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if not is_known(os.environ["MASTER_ADDR"]):
        raise RecipeError(
            "the host name of rank 0 cannot be resolved",
            where="MASTER_ADDR",
            value=os.environ["MASTER_ADDR"],
            hint="set --master-addr to a host name or an address that all nodes of the job can resolve",
        )
    if os.environ["RANK"] != "0":
        return None
    joining = importlib.import_module("automodel_ckpt.parallel.ranks.joining")
    return joining.serve_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
