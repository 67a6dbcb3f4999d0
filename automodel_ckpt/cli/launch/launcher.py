"""Start the ranks of a run, or join those that torchrun or srun started; return the exit code of `ckpt-train`.

There are three cases, and in each of them a rank calls :func:`automodel_ckpt.cli.launch.worker.run_rank`:

* a single rank runs in this process;
* several ranks are forked (:mod:`automodel_ckpt.cli.launch.forked_run`);
* torchrun or srun has started this process as one rank: each rank is a separate command, and no launcher of this
  package sees them all.

The signals that stop a run (``step_scheduler.stop_signals``) are handled from before the imports. A process that forks
ranks passes its signals to them. The ranks save and return 75.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from automodel_ckpt.base.terminal import forgiving_streams
from automodel_ckpt.cli.launch.failures import (
    FailureRecord,
    failure_record,
    failure_text,
    printed_failure,
)
from automodel_ckpt.cli.launch.process import print_message, report_stop, this_rank, world_size
from automodel_ckpt.cli.launch.ranks import (
    SET_MASTER_ADDR,
    choose_rendezvous,
    remove_leftover_ranks,
    slurm_environment,
    started_by,
)
from automodel_ckpt.cli.launch.worker import (
    Prepare,
    configure_torch,
    import_recipe,
    keep_memory,
    run_rank,
)
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import (
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_STOPPED,
    AutomodelError,
    RecipeError,
    describe,
)
from automodel_ckpt.parallel.ranks.network import is_known
from automodel_ckpt.parallel.ranks.stop import StoppedWaiting, stop_request

TORCHRUN_GRACE_SECONDS = 20.0
"""torchrun kills its ranks 30 seconds after it has passed a signal on to them. They also have to close."""


def launch(loaded: LoadedRecipe, flags: LaunchFlags, prepare: Prepare) -> int:
    """Run a loaded recipe with the ranks that the flags and the environment describe; return the exit code.

    Raises nothing: a failure is printed once, as the last output. *prepare* imports what the ranks need and returns the
    checked recipe and its class. It is called once, after the variables that torch reads at its import are set.
    """
    with forgiving_streams():
        return _launch(loaded, flags, prepare)


def _launch(loaded: LoadedRecipe, flags: LaunchFlags, prepare: Prepare) -> int:
    try:
        request = stop_request()
        # A program may call main() several times. Otherwise, ranks would ignore signals after a finished run.
        request.reset()
        request.signals = stop_signals(loaded)
        program = started_by(os.environ, flags)
        if program == "srun":
            os.environ.update(slurm_environment(os.environ, flags))
        if program is not None:
            return _run_joined(prepare, serve=program == "srun")
        leftover = remove_leftover_ranks(os.environ)
        if leftover:
            names = " and ".join(leftover)
            print_message(f"ignoring {names} in the environment: MASTER_ADDR is not set")
        # Raises RecipeError for contradictory flags, also if no rendezvous is needed.
        rendezvous = choose_rendezvous(flags, os.environ)
        if flags.nproc_per_node == "1" and flags.nnodes == "1" and not flags.max_restarts:
            return _run_alone(prepare)
        from automodel_ckpt.cli.launch.forked_run import run_forked

        return run_forked(flags, rendezvous, prepare)
    except StoppedWaiting:
        return report_stop(stop_request().requested, "before training began")
    except Exception as error:
        record = failure_record(error, 0)
        print_message(failure_text(record, several_ranks=False))
        return record.code


def stop_signals(loaded: LoadedRecipe) -> Sequence[signal.Signals]:
    """Return the signals that stop the run; without SIGHUP if this process ignores it, because nohup started it."""
    numbers = loaded.config.step_scheduler.stop_signal_numbers
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [number for number in numbers if number != signal.SIGHUP]
    return list(numbers)


def _run_alone(prepare: Prepare) -> int:
    """Run the only rank in this process."""
    stop_request().install()
    configure_torch(os.environ)
    with stop_request().interrupting():
        loaded, recipe_class = import_recipe(prepare)
    _note_process_start()

    def on_failure(record: FailureRecord) -> None:
        print_message(printed_failure(record, several_ranks=False))

    code = run_rank(loaded, recipe_class, on_failure)
    keep_memory(loaded, code)
    return code


def _run_joined(prepare: Prepare, *, serve: bool) -> int:
    """Run the rank of this process, and return its exit code. With *serve* (srun), rank 0 serves the ranks' store."""
    from automodel_ckpt.parallel.ranks import hangs

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
        _note_process_start()
    except AutomodelError as error:
        # All ranks of a node raise it. Under srun, LOCAL_RANK is 0 in each task that sees its own GPU alone.
        if os.environ.get("SLURM_LOCALID" if serve else "LOCAL_RANK", "0") == "0":
            print_message(describe(error)[1])
        code = error.exit_code
    else:
        with hangs.ending_processes():
            code = run_rank(loaded, recipe_class, _report, exit_stopped)
        # All ranks of a node get here as they end, unless a restart follows. The one that owned the memory does the
        # work, or, if it was killed, another one. If all are killed, the memory is kept for the next start. torchrun's
        # agent kills the one that copies 30 seconds after another rank has failed; the memory is then kept, too. No
        # process is left to continue the copy: it would own the run directory when the next start needs it.
        if not hangs.has_restarts_left(os.environ):
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
            "MASTER_ADDR",
            os.environ["MASTER_ADDR"],
            SET_MASTER_ADDR,
        )
    if os.environ["RANK"] != "0":
        return None
    mesh = import_module("automodel_ckpt.parallel.mesh")
    return mesh.serve_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _note_process_start() -> None:
    """Note when this start began. Called after the import of the recipe: the timeline needs torch."""
    from automodel_ckpt.logs.timeline import note_process_start

    note_process_start(os.getpid())
