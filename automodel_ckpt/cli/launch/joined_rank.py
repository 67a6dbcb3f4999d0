"""Run a rank that torchrun or srun started, in this process.

Each rank is a separate command, and no launcher of this package sees them all. The ranks decide through a store which
of them prints the failure of the run.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from automodel_ckpt.cli.launch.failures import FailureRecord, printed_failure
from automodel_ckpt.cli.launch.process import print_message, this_rank, world_size
from automodel_ckpt.cli.launch.recipe_import import Prepare, configure_torch, import_recipe
from automodel_ckpt.cli.launch.worker import Loaded, RecipeClass, keep_memory_of_rank, run_rank
from automodel_ckpt.errors import EXIT_DONE, EXIT_STOPPED, AutomodelError, RecipeError, describe
from automodel_ckpt.logs.start_time import note_process_start
from automodel_ckpt.parallel.ranks import hang_action
from automodel_ckpt.parallel.ranks.network import can_be_reached, is_known
from automodel_ckpt.parallel.ranks.stop import stop_request

SECONDARY_DELAY_SECONDS = 1.0
"""How long a rank waits if its failure followed from another rank's, so that the other one reports first."""
STORE_SECONDS = 5.0
"""How long a rank waits for the store; rank 0 under srun serves it so long after a failure."""
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
    has_asked = False

    def is_first() -> bool:
        nonlocal has_asked
        has_asked = True
        return is_first_to_report()

    try:
        loaded, recipe_class = import_recipe(prepare)
        note_process_start(os.getpid())
    except AutomodelError as error:
        if is_first():
            print_message(describe(error)[1])
        code = error.exit_code
    else:
        code = _run_rank(loaded, recipe_class, is_first, exit_stopped)
        keep_memory_of_rank(loaded, code)
    if store is not None:
        if has_asked:
            # The other ranks also ask this store whether they print their failure.
            time.sleep(STORE_SECONDS)
        return code
    return exit_stopped if code == EXIT_STOPPED else code


def _run_rank(
    loaded: Loaded,
    recipe_class: RecipeClass,
    is_first: Callable[[], bool],
    exit_stopped: int,
) -> int:
    """Run the rank of this process, and return its exit code.

    A rank prints its own failure if *is_first* returns True. All ranks of a run stop together after a save,
    so then rank 0 prints the message without asking the others.
    """

    def on_failure(record: FailureRecord) -> None:
        if not record.primary:
            time.sleep(SECONDARY_DELAY_SECONDS)
        is_reporter = this_rank() == 0 if record.stopped_in_training else is_first()
        if is_reporter:
            print_message(printed_failure(record, several_ranks=world_size() > 1))

    with hang_action.ending_processes():
        return run_rank(loaded, recipe_class, on_failure, exit_stopped)


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


def is_first_to_report() -> bool:
    """Whether this rank is the first of its run that calls this function, and so prints its failure.

    The store of torchrun's agent, or of rank 0 under srun, counts the calls. True if there is no store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    distributed = importlib.import_module("torch.distributed")
    timeout = timedelta(seconds=STORE_SECONDS)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not can_be_reached(host, port):
        return True
    # torchrun keeps one store over restarts, and each start has its first failure.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = distributed.TCPStore(
            host, port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        return bool(store.add(f"automodel_ckpt/failure_reports/{restart}", 1) == 1)
    except RuntimeError:  # the base class of torch's store and network errors
        return True
