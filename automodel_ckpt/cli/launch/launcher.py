"""Start the ranks of a run, or join those that torchrun or srun started; return the exit code of `ckpt-train`.

There are three cases, and in each of them a rank calls :func:`automodel_ckpt.cli.launch.worker.run_rank`:

* a single rank runs in this process;
* several ranks are forked (:mod:`automodel_ckpt.cli.launch.forked_run`);
* torchrun or srun has started this process as one rank (:mod:`automodel_ckpt.cli.launch.joined_rank`).

The signals that stop a run (``step_scheduler.stop_signals``) are handled from before the imports. A process that forks
ranks passes its signals to them. The ranks save and return 75.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from automodel_ckpt.cli.common.terminal import forgiving_streams
from automodel_ckpt.cli.launch.failures import (
    FailureRecord,
    failure_record,
    failure_text,
    printed_failure,
)
from automodel_ckpt.cli.launch.process import print_message, report_stop
from automodel_ckpt.cli.launch.recipe_import import Prepare, configure_torch, import_recipe
from automodel_ckpt.cli.launch.rendezvous_flags import choose_rendezvous
from automodel_ckpt.cli.launch.started_ranks import (
    remove_leftover_ranks,
    slurm_environment,
    started_by,
)
from automodel_ckpt.cli.launch.worker import keep_memory, run_rank
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.logs.start_time import note_process_start
from automodel_ckpt.parallel.ranks.stop import StoppedWaiting, stop_request


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
            from automodel_ckpt.cli.launch.joined_rank import run_joined

            return run_joined(prepare, serve=program == "srun")
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
    numbers: Sequence[signal.Signals] = loaded.config.step_scheduler.stop_signal_numbers
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [number for number in numbers if number != signal.SIGHUP]
    return list(numbers)


def _run_alone(prepare: Prepare) -> int:
    """Run the only rank in this process."""
    stop_request().install()
    configure_torch(os.environ)
    with stop_request().interrupting():
        loaded, recipe_class = import_recipe(prepare)
    note_process_start(os.getpid())

    def on_failure(record: FailureRecord) -> None:
        print_message(printed_failure(record, several_ranks=False))

    code = run_rank(loaded, recipe_class, on_failure)
    keep_memory(loaded, code)
    return code
