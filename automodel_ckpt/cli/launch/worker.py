"""Import the recipe and run it in this process as one rank, whoever started it.

After a failure, it is closed within a time limit.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Collection, MutableMapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeVar

from automodel_ckpt.base.user_code import reporting_user_failures
from automodel_ckpt.checkpoint.files.type_aliases import Texts
from automodel_ckpt.checkpoint.run.lease import release_all
from automodel_ckpt.cli.launch.failures import (
    SECOND_SIGNAL_CODE,
    FailureRecord,
    early_stop_record,
    failure_record,
    failure_text,
)
from automodel_ckpt.cli.launch.node_resources import set_allocator
from automodel_ckpt.cli.launch.process import exit_now, print_message, this_rank, world_size
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.errors import EXIT_DONE, EXIT_STOPPED, AutomodelError, RecipeError, Stopped
from automodel_ckpt.logs.progress import Progress
from automodel_ckpt.parallel.ranks.network import let_gloo_be_found
from automodel_ckpt.parallel.ranks.stop import StoppedWaiting, StopRequest, stop_request

NOISY_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
CLOSE_SECONDS = 5.0
"""How long a failed recipe may take to close: it may wait for ranks that have ended."""


class Recipe(Protocol):
    """The interface of a recipe. Its class is called as ``cls(config, config_yaml=text)``.

    Then two attributes are set: ``origins`` maps each dotted key to the place where its value was set, and
    ``overridden`` contains the keys that the command line sets.
    """

    origins: Texts
    overridden: Collection[str]

    def setup(self) -> None: ...
    def run(self) -> None: ...
    def close(self) -> None: ...


T = TypeVar("T")
RecipeClass = Callable[..., Recipe]
Prepare = Callable[[], tuple[LoadedRecipe, RecipeClass]]
"""Imports what the ranks need, and returns the checked recipe and its class."""


def configure_torch(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads at its import: fewer messages, and GPUs are counted without initializing CUDA.

    Variables that the user has set are not changed.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    set_allocator(environment)
    # After a restart, a shared store would give the new ranks the addresses of the old ones (pytorch #135712).
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())


def import_recipe(prepare: Callable[[], T]) -> T:
    """Call *prepare* without garbage collection, which would traverse the objects of the modules again and again.

    These objects live as long as the process. Freezing them also keeps a collection in a rank from copying the memory
    pages that the ranks share.
    """
    gc.disable()
    try:
        return prepare()
    finally:
        gc.freeze()
        gc.enable()


def run_rank(
    loaded: LoadedRecipe,
    recipe_class: RecipeClass,
    on_failure: Callable[[FailureRecord], None],
    exit_stopped: int = EXIT_STOPPED,
) -> int:
    """Run the recipe in this process as the rank in the environment (RANK, default 0), and return its exit code.

    Raises nothing. *on_failure* is called with the failure record before anything is closed. A signal before training
    may end the process with *exit_stopped*. Afterwards, the threads of process groups have ended, unless closing them
    took longer than CLOSE_SECONDS.
    """
    recipe = None
    stop, is_training = stop_request(), False
    stop.exit_code = exit_stopped

    def leave(number: int) -> None:
        on_failure(early_stop_record(this_rank(), number))
        # During setup, no object may own the lease yet, and exit_now() closes nothing.
        _run_with_time_limit(release_all)
        exit_now(exit_stopped)

    try:
        let_gloo_be_found(os.environ)
        with stop.before_training(leave), reporting_user_failures(RecipeError):
            recipe = recipe_class(loaded.config, config_yaml=loaded.to_yaml())
            recipe.origins = loaded.origins
            recipe.overridden = frozenset(loaded.overridden)
            recipe.setup()
        is_training = True
        with reporting_user_failures(AutomodelError):
            recipe.run()
            recipe.close()
        _leave_process_groups()
        stop.finished = True
        return EXIT_DONE
    # BaseException: StoppedWaiting and SystemExit must also leave a record for the other ranks.
    except BaseException as error:
        # A second signal must not change the exit code of a rank that has saved: srun sends one to all tasks as soon
        # as the first has ended with 75, where Slurm's KillOnBadExit is set.
        stop.finished = isinstance(error, Stopped)
        record = failure_record(error, this_rank())
        if not is_training and _was_stopped(stop, error, record):
            record = early_stop_record(this_rank(), stop.requested)
            stop.finished = True
        progress = getattr(getattr(recipe, "run_log", None), "progress", None)
        if isinstance(progress, Progress):
            # The error begins on a new line. The live line stays as the last sign of the run, unless it saved its step.
            record = replace(record, follows_log=True)
            with suppress(Exception):
                (progress.close if stop.finished else progress.break_off)()
        on_failure(record)
        text = failure_text(record, several_ranks=world_size() > 1)
        _run_with_time_limit(lambda: _log_failure(recipe, text))
        # After on_failure(): closing may wait for dead ranks, and the others act on the record.
        _close_quietly(recipe)
        if not is_training:
            _run_with_time_limit(release_all)
        return record.code


def _was_stopped(stop: StopRequest, error: BaseException, record: FailureRecord) -> bool:
    """Whether *error* is the result of a stop request, or of another rank that stopped first."""
    if not stop.wanted:
        return False
    return stop.interrupted or isinstance(error, StoppedWaiting) or not record.primary


def _log_failure(recipe: Recipe | None, text: str) -> None:
    """Write the error to the run's ``log.txt``, if the run got so far."""
    log_failure = getattr(getattr(recipe, "run_log", None), "log_failure", None)
    if log_failure is not None:
        with suppress(Exception):
            log_failure(text)


def _close_quietly(recipe: Recipe | None) -> None:
    """Close a failed recipe and leave its process groups, with a time limit: both may wait for dead ranks."""

    def close() -> None:
        try:
            if recipe is not None:
                recipe.close()
        except BaseException:  # noqa: S110 - the failure is already recorded, and this error follows from it
            pass
        finally:
            _leave_process_groups()

    _run_with_time_limit(close)


def _run_with_time_limit(action: Callable[[], None]) -> None:
    """Run *action* in a thread, and abandon the thread after CLOSE_SECONDS."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)


def _leave_process_groups() -> None:
    distributed = import_module("torch.distributed")
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


# ---------------------------------------------------------------- checkpoints in memory, after a failure


def keep_memory(loaded: LoadedRecipe, code: int, *, by_rank: bool = False) -> None:
    """Copy the newest memory checkpoint to the run directory, and free the memory. All ranks have ended with *code*.

    A run that is done, or stopped after a save, has removed its memory checkpoints. After a second signal, they are
    removed without a copy. With *by_rank*, this process is a rank. Raises nothing: a failure is printed, and the memory
    is kept for the next start.
    """
    section = loaded.config.checkpoint.memory
    if section is None or code in (EXIT_DONE, EXIT_STOPPED):
        return
    run = Path(with_local_directory(loaded.config).checkpoint.checkpoint_dir)
    copies = code <= SECOND_SIGNAL_CODE
    from automodel_ckpt.checkpoint.memory.rescue import keep_on_disk

    message = keep_on_disk(run, Path(section.directory), copies=copies, by_rank=by_rank)
    if message:
        print_message(message)
