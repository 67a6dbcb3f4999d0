"""What happens to the checkpoints in memory when a run ends with a failure that no restart follows."""

from __future__ import annotations

import os
from pathlib import Path

from automodel_ckpt.cli.launch.failures import SECOND_SIGNAL_CODE
from automodel_ckpt.cli.launch.process import print_message
from automodel_ckpt.cli.launch.worker import Loaded
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.errors import EXIT_DONE, EXIT_STOPPED
from automodel_ckpt.parallel.ranks.hang_action import has_restarts_left


def keep_memory(loaded: Loaded, code: int, *, by_rank: bool = False) -> None:
    """Copy the newest memory checkpoint to the run directory, and free the memory. All ranks have ended with *code*.

    A run that is done, or stopped after a save, has removed its memory checkpoints. After a second signal, they are
    removed without a copy. With *by_rank*, this process is a rank (see :func:`keep_memory_of_rank`). Raises nothing: a
    failure is printed, and the memory is kept for the next start.
    """
    section = getattr(getattr(loaded.config, "checkpoint", None), "memory", None)
    if section is None or code in (EXIT_DONE, EXIT_STOPPED):
        return
    run = Path(with_local_directory(loaded.config).checkpoint.checkpoint_dir)
    copies = code <= SECOND_SIGNAL_CODE
    from automodel_ckpt.checkpoint.memory.rescue import keep_on_disk

    message = keep_on_disk(run, Path(section.directory), copies=copies, by_rank=by_rank)
    if message:
        print_message(message)


def keep_memory_of_rank(loaded: Loaded, code: int) -> None:
    """Call :func:`keep_memory` in a rank of torchrun or srun that ends with *code*, unless a restart follows.

    All ranks of a node call it as they end. The one that owned the memory does the work, or, if it was killed, another
    one. If all are killed, the memory is kept for the next start. torchrun's agent kills the one that copies 30 seconds
    after another rank has failed; the memory is then kept, too. No process is left to continue the copy: it would own
    the run directory when the next start needs it, and clusters kill it with the job.
    """
    if not has_restarts_left(os.environ):
        keep_memory(loaded, code, by_rank=True)
