"""Worker processes that read data: torch's, with signals and their end under control of the rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from automodel_ckpt.base.python_child import freeze_in_forked_processes
from automodel_ckpt.errors import AutomodelError

WORKER_END_SECONDS = 1.0
"""How long a worker process may take to end before it is killed."""


def run_workers(dataset: Dataset[Any], num_workers: int, **options: Any) -> Generator[Any]:
    """Yield the items that worker processes read from *dataset*, in order, without advancing the global generator.

    Closing the generator ends the processes. Nothing may keep torch's iterator alive longer, not even the traceback of
    an exception: workers that are forked later would inherit it and fail. Raises :class:`AutomodelError` if a worker
    dies.
    """
    freeze_in_forked_processes()
    # Patch for torch 2.10 to 2.13: without this mark, torch installs a handler of SIGCHLD that raises an error when a
    # worker dies, at whatever the main thread is doing, for example in a save. The code that waits for the worker's
    # batch notices the death in any case.
    signal_handling._SIGCHLD_handler_set = True
    loader: DataLoader[Any] = DataLoader(
        dataset,
        # torch makes no batches: each item that the sampler yields is a request for a micro-batch.
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,
        worker_init_fn=_leave_signals_to_the_rank,
        # Python 3.14 would start a server of processes, which searches the current directory for modules.
        multiprocessing_context="fork",
        # Without it, torch draws the seed of the workers from the global generator.
        generator=torch.Generator(),
        **options,
    )
    death = None
    items: Any = iter(loader)
    try:
        yield from items
    except RuntimeError as error:
        death = str(error)
        for worker in items._workers:
            if not worker.is_alive():
                death = f"process {worker.pid} ended with exit code {worker.exitcode}"
    finally:
        _end_workers(items)
        del items
    # Raised here, because an exception that is chained to torch's would keep its iterator alive.
    if death is not None:
        raise AutomodelError(
            "a data loading worker died",
            where="dataloader.num_workers",
            value=f"{num_workers}; {death}",
            hint="check for the out-of-memory killer (exit code -9) and a full /dev/shm, or set "
            "dataloader.num_workers 0",
        )


def _end_workers(items: Any) -> None:
    """End the worker processes of torch's iterator, including those that are blocked in the data set's code.

    A worker is killed only after it was asked to end: an idle worker might hold a lock that is needed to end the
    iterator.
    """
    # The private attributes are from torch 2.10 to 2.13. torch's own shutdown waits five seconds for each worker and
    # then sends SIGTERM, which these workers ignore.
    items._workers_done_event.set()
    for number, is_running in enumerate(items._workers_status):
        if is_running:
            items._mark_worker_as_unavailable(number, shutdown=True)
    deadline = time.monotonic() + WORKER_END_SECONDS
    for worker in items._workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    blocked = [worker for worker in items._workers if worker.is_alive()]
    if blocked:
        # torch reports the death of a registered worker as an error.
        signal_handling._remove_worker_pids(id(items))  # type: ignore[attr-defined]
        items._worker_pids_set = False
    for worker in blocked:
        worker.kill()
        worker.join()


def _unchanged(item: Any) -> Any:
    return item


def _leave_signals_to_the_rank(worker_id: int) -> None:
    """Ignore signals: a scheduler signals all processes of a job, but the rank needs its batches to stop in order."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
