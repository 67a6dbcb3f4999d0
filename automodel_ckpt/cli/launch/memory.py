"""What happens to the checkpoints in memory when a run ends with a failure that no restart follows."""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.failures import RETRY
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.checkpoint.run.memory_directory import copy_to_disk, memory_of, remove_memory
from automodel_ckpt.cli.launch.failures import SECOND_SIGNAL_CODE
from automodel_ckpt.cli.launch.worker import Loaded, print_message
from automodel_ckpt.config.urls import with_local_directory
from automodel_ckpt.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    AutomodelError,
    describe,
    os_problem,
)


def keep_memory(loaded: Loaded, code: int) -> None:
    """Copy the newest memory checkpoint to the run directory, and free the memory. All ranks have ended with *code*.

    A run that is done, or stopped after a save, has removed its memory checkpoints. After a second signal, they are
    removed without a copy. Raises nothing: a failure is printed, and the memory is kept for the next start.
    """
    section = getattr(getattr(loaded.config, "checkpoint", None), "memory", None)
    if section is None or code in (EXIT_DONE, EXIT_STOPPED):
        return
    run = Path(with_local_directory(loaded.config).checkpoint.checkpoint_dir).absolute()
    try:
        directory = memory_of(run, Path(section.directory))
        if directory is None:
            return
        # Another live run of this directory would own the memory, too.
        lease = Lease(run)
        try:
            copy = copy_to_disk(directory, run) if code <= SECOND_SIGNAL_CODE else None
            remove_memory(directory)
        finally:
            lease.release()
    except AutomodelError as error:
        print_message(f"the checkpoints in memory are kept: {describe(error)[1]}")
    except OSError as error:
        problem = os_problem(error, "the checkpoint in memory could not be copied", hint=RETRY)
        print_message(str(problem))
    else:
        if copy is not None:
            print_message(f"the newest checkpoint in memory was copied to {copy}")
