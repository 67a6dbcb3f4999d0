"""Which samples a rank trains on in which order, and reading and collating the samples of one micro-batch.

The order is computed by pure functions: one permutation per epoch. Its slices are the global batches. Only
:meth:`BatchSizes.rank_part` depends on the number of ranks. Any number of ranks therefore trains on the same global
batches in the same order.

Samples are read with the same result in the rank and in a worker process. The random generators are seeded before each
sample from (seed, epoch, sample). A sample therefore depends neither on the worker that read it nor on the samples read
before, and a resumed epoch equals an uninterrupted one.

The worker processes are torch's, with signals and their end under control of the rank.
"""

from __future__ import annotations

import hashlib
import random
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from automodel_ckpt.base.python_child import freeze_in_forked_processes
from automodel_ckpt.base.rng import seed_everything
from automodel_ckpt.base.user_code import location_in_user_code
from automodel_ckpt.data.collate import IGNORE_INDEX, Batch, Ids
from automodel_ckpt.errors import AutomodelError, RecipeError

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class BatchSizes:
    """How a global batch is divided into micro-batches, and the rank that reads its part.

    *with_preceding*: the collator also gets the sample before the samples of a micro-batch.
    """

    global_batch_size: int
    local_batch_size: int
    dp_rank: int
    dp_size: int
    drop_last: bool
    with_preceding: bool = False

    def rank_part(self, ids: Sequence[int]) -> list[Ids]:
        """Return the micro-batches of the rank, as lists of the *ids* of a global batch.

        The ids are divided, in order, into micro-batches of the local batch size (the last may be shorter). Each rank
        takes a contiguous run of them; if they do not divide evenly, the first ranks take one more. Every rank returns
        the same number of micro-batches: ranks with one fewer get an empty list as their last.
        """
        size = self.local_batch_size
        micro_batches = [list(ids[start : start + size]) for start in range(0, len(ids), size)]
        num_each, num_extra = divmod(len(micro_batches), self.dp_size)
        first = self.dp_rank * num_each + min(self.dp_rank, num_extra)
        has_extra = self.dp_rank < num_extra
        own = micro_batches[first : first + num_each + has_extra]
        if num_extra and not has_extra:
            # Every rank must run the same number of forward passes: FSDP communicates in each.
            own.append([])
        return own


def derive_seed(*parts: int) -> int:
    """Derive a seed of 63 bits from several integers. It does not depend on the machine or on library versions."""
    # Pass Python integers: NumPy 2 writes np.int64(1), which would give another order.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permutation(num_samples: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the order of an epoch: an int64 tensor of shape [num_samples] with each index once.

    Sample ``i`` gets as key the i-th output of the generator SplitMix64 seeded with ``derive_seed(seed, epoch)``, and
    the keys are sorted (stably). ``torch.randperm`` is not used because a resumed epoch has to continue in the same
    order after an upgrade of torch. Source of SplitMix64: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014.
    """
    if not shuffle:
        return torch.arange(num_samples, dtype=torch.int64)
    keys = _splitmix64(derive_seed(seed, epoch), num_samples)
    order = np.argsort(keys, kind="stable")
    return torch.from_numpy(order.astype(np.int64, copy=False))


def _splitmix64(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    state = np.arange(1, count + 1, dtype=np.uint64)
    # Arithmetic modulo 2**64: arrays of uint64 wrap silently, NumPy scalars would warn.
    state *= np.uint64(_GOLDEN_GAMMA)
    state += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


Collate = Callable[[list[Any]], Batch]


@dataclass(slots=True)
class GlobalBatch:
    """One global batch as one rank sees it.

    *sample_ids* are the ids of the whole global batch, the same on every rank: indices of a map-style data set,
    positions in the epoch of an iterable one. *micro_batches* are this rank's, the same number on every rank; if the
    rank's part is empty, it is a batch of one sample with all labels -100. *index* counts global batches and *start*
    samples from the beginning of the epoch. *source_state* is an iterable data set's own state after it.
    """

    epoch: int
    index: int
    start: int
    sample_ids: Ids
    micro_batches: list[Batch] = field(repr=False)
    last_of_epoch: bool
    source_state: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Request:
    """One micro-batch to read: its sample ids. If there are none, the sample *filler* is read, without labels.

    *preceding* is the sample that the collator gets before these; None: it gets only these.
    """

    seed: int
    epoch: int
    sample_ids: Ids
    filler: int
    preceding: int | None = None


@dataclass(frozen=True)
class Failure:
    """An error that a worker process passes to the rank, where it is raised."""

    error: AutomodelError


class SampleReader(Dataset[Any]):
    """A map-style data set of micro-batches: indexed by a :class:`Request`."""

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.may_draw = not (_draws_nothing(dataset) and _draws_nothing(collate_fn))

    def __getitem__(self, request: Request) -> Batch | Failure:
        # FSDP needs equal numbers of forward passes, so a rank without samples reads one.
        ids = request.sample_ids or [request.filler]
        if request.preceding is not None:
            ids = [request.preceding, *ids]
        try:
            samples = [self._read(request, sample_id) for sample_id in ids]
            # A collator that draws continues with the seed of the last sample, as on a resume.
            return collate(self.collate_fn, samples, ids, empty=not request.sample_ids)
        except AutomodelError as error:
            # Not raised: torch would replace it in the rank by an error with a traceback as its
            # only argument.
            return Failure(error)

    def _read(self, request: Request, sample_id: int) -> Any:
        if self.may_draw:
            seed = derive_seed(request.seed, request.epoch, sample_id)
            # CPU generators only: a forked worker must not initialize CUDA.
            seed_everything(seed, devices=False)
        return read_sample(self.dataset, sample_id)


def read_sample(dataset: Any, sample_id: int) -> Any:
    """Read a sample of a map-style data set. Raises :class:`AutomodelError` with the location of one that fails."""
    try:
        return dataset[sample_id]
    except Exception as error:
        raise with_location(error, f"dataset[{sample_id}]", "could not be read") from error


def _draws_nothing(part: Any) -> bool:
    """Whether a data set or collator declares that it draws no random numbers.

    The declaration is not inherited: a subclass may draw.
    """
    declares = vars(type(part)).get("draws_nothing") is True
    for name in ("dataset", "collate_fn"):
        wrapped = getattr(part, name, None)
        if wrapped is not None:
            declares = declares and _draws_nothing(wrapped)
    return declares


def collate(collate_fn: Collate, samples: list[Any], ids: Sequence[int], *, empty: bool) -> Batch:
    """Collate a micro-batch of *samples*. With *empty*, all labels are set to -100, so that it has no loss."""
    try:
        batch = collate_fn(samples)
    except Exception as error:
        raise with_location(
            error,
            f"samples {list(ids)} of the data set",
            "could not be collated",
            hint="pad samples of different lengths in dataloader.collate_fn, labels too, or leave it out: "
            "the default pads",
        ) from error
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), torch.Tensor):
        raise RecipeError(
            "collate_fn must return a mapping of tensors with a key 'labels'",
            where="dataloader.collate_fn",
            value=type(batch).__name__ if not isinstance(batch, Mapping) else ", ".join(batch),
            hint="",
        )
    if empty:
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
    return batch


def with_location(
    error: Exception,
    where: str,
    what: str,
    *,
    hint: str = "correct or remove this sample, or fix the data set's code",
) -> AutomodelError:
    """Return *error* with the location *where* of its sample in front.

    An exception of another library is wrapped in an :class:`AutomodelError` with its file and line.
    """
    if isinstance(error, AutomodelError):
        problems = []
        for problem in error.problems:
            # As text, because a worker process pickles the error for the rank.
            value = str(problem.value)
            problems.append(replace(problem, where=f"{where}: {problem.where}", value=value))
        return type(error).all_of(problems)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return AutomodelError(
        f"{where} {what}",
        where=location_in_user_code(error) or f"{frame.filename}:{frame.lineno} in {frame.name}",
        value=f"{type(error).__name__}: {error}",
        hint=hint,
    )


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restore the host generators of python, numpy and torch on exit."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def read_all(reader: Any, requests: Iterable[Any], num_workers: int) -> Generator[Any]:
    """Yield ``reader[request]`` for *requests* in order, read by *num_workers* processes, or in this one for 0.

    Reading in this process advances its random generators; :func:`isolated_rng` restores them. Raises
    :class:`AutomodelError` for a sample that cannot be read.
    """
    if num_workers:
        items = run_workers(reader, num_workers, sampler=requests)
    else:
        items = (reader[request] for request in requests)
    yield from raising(items)


def raising(items: Generator[Any]) -> Generator[Any]:
    """Yield *items*. Raises the error of the first :class:`Failure`."""
    with closing(items):
        for item in items:
            if isinstance(item, Failure):
                raise item.error
            yield item


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
