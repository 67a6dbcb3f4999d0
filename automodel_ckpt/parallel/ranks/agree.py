"""Collectives for control: gather and broadcast objects, sum numbers, and raise an error on all ranks or on none.

Each rank of the group must call each function, in the same order. The group is a gloo group, so that nothing waits
for a GPU. None is a group of one rank without a process group. A group of one rank does not communicate. Objects are
pickled: the ranks of one run trust each other.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from automodel_ckpt.errors import AutomodelError, Problem, describe, limit_error

T = TypeVar("T")

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.005, 0.5


def gather_objects(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """The ``value`` of each rank, ordered by rank in the group; the list is equal on all ranks."""
    if size(group) == 1:
        return [value]
    values: list[Any] = [None] * size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(group: dist.ProcessGroup | None, value: T, source: int = 0) -> T:
    """The ``value`` of the rank ``source`` (its rank in the group); the values of other ranks are ignored."""
    if size(group) == 1:
        return value
    values: list[Any] = [value if dist.get_rank(group) == source else None]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]  # type: ignore[no-any-return]


def sum_over_ranks(group: dist.ProcessGroup | None, *values: float) -> list[float]:
    """The sums of numbers over the ranks in float64 (exact for counts below 2**53); equal on all ranks."""
    if size(group) == 1:
        return [float(value) for value in values]
    vector = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(vector, group=group)
    return vector.tolist()


def on_any_rank(group: dist.ProcessGroup | None, flags: Sequence[bool]) -> list[bool]:
    """Whether each of *flags* is true on a rank; equal on all ranks, which pass equally many."""
    if size(group) == 1:
        return list(flags)
    vector = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)
    return [value > 0 for value in vector.tolist()]


def on_all_ranks(group: dist.ProcessGroup | None, holds: bool) -> bool:
    """Whether *holds* is true on every rank; equal on all ranks."""
    return sum_over_ranks(group, holds)[0] == size(group)


def all_or_nothing(group: dist.ProcessGroup | None, error: BaseException | None) -> None:
    """Raise an error on all ranks if any rank passes one; otherwise, return on all ranks.

    The raised error has the class of the first failing rank's error if that is an :class:`AutomodelError`, otherwise
    the class :class:`AutomodelError`. It names that rank, and the other failing ranks with their reasons. Its attribute
    ``rank`` is the first failing rank of the group. On that rank, ``__cause__`` is the original exception.
    """
    if size(group) == 1:
        if error is not None:
            raise error
        return
    # Ranks without an error take part too: if a failed rank raised before this, they would wait for
    # it here.
    reports = gather_objects(group, None if error is None else _portable(error))
    _raise_reported(reports, error)


def gather_or_raise(
    group: dist.ProcessGroup | None,
    work: Callable[[], T],
    convert: Callable[[Exception], AutomodelError] | None = None,
) -> list[T]:
    """The result of *work* on each rank, ordered by rank in the group. Raises on all ranks what it raises on one rank.

    It takes one exchange. *work* must not contain a collective after the point where one rank can fail. *convert* is
    the argument of :func:`raise_on_all_ranks`.
    """
    if size(group) == 1:
        with raise_on_all_ranks(group, convert):
            return [work()]
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = _for_all_ranks(error, convert)
    outcomes = gather_objects(group, (result, None if failure is None else _portable(failure)))
    _raise_reported([report for _, report in outcomes], failure)
    # None failed, so that all have a result.
    return [value for value, _ in outcomes]  # type: ignore[misc]


@contextlib.contextmanager
def raise_on_all_ranks(
    group: dist.ProcessGroup | None,
    convert: Callable[[Exception], AutomodelError] | None = None,
) -> Iterator[None]:
    """Raise on all ranks what the block raises on one rank (see :func:`all_or_nothing`).

    The block must not contain a collective after the point where one rank can fail: the other ranks would wait in it.
    *convert* turns any exception into an error for the user. Without it, :class:`AutomodelError` and OSError are raised
    on all ranks, and any other exception, a defect, only on this rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = _for_all_ranks(error, convert)
    all_or_nothing(group, failure)


def _for_all_ranks(
    error: Exception, convert: Callable[[Exception], AutomodelError] | None
) -> Exception:
    """The error to raise on all ranks for *error* of this rank. Raises *error* itself if it is a defect."""
    if convert is not None:
        return convert(error)
    if isinstance(error, AutomodelError | OSError):
        return error
    # A defect ends this rank only. The launcher then ends the others, which wait in the next
    # exchange.
    raise error


def while_working(
    group: dist.ProcessGroup | None,
    work: Callable[[], T],
    cancel: Callable[[], object] = lambda: None,
) -> T:
    """Call *work*, which may take longer than the group's timeout, and return its value when all ranks are done.

    The ranks exchange their status at least every half second, so no collective waits long. An exception of *work* is
    raised when all ranks are done, on this rank only. If the wait is interrupted, by a stop request or because
    another rank has ended, *cancel* is called, so that *work* ends before the exception is raised.
    """
    if size(group) == 1:
        return work()
    with ThreadPoolExecutor(1, "while-working") as pool:
        # *work* must not use this group: its collectives would be matched with the loop's
        # collectives below.
        done = pool.submit(work)
        pause = _FIRST_PAUSE_SECONDS
        # Every rank sees the same list, so all leave the loop in the same iteration.
        try:
            while not all(gather_objects(group, done.done())):
                wait([done], timeout=pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        except BaseException:
            # The executor waits for its thread.
            cancel()
            raise
    return done.result()


def size(group: dist.ProcessGroup | None) -> int:
    """The number of ranks of the group."""
    return 1 if group is None else dist.get_world_size(group)


def _portable(error: BaseException) -> AutomodelError:
    """The error as an object that every rank can unpickle; an exception of another library becomes its message."""
    if isinstance(error, AutomodelError):
        bare = copy.copy(error)
        # Other attributes may hold objects that cannot be pickled.
        bare.__dict__ = {"problems": error.problems}
        return bare
    if (limit := limit_error(error)) is not None:
        return limit
    return AutomodelError(
        describe(error)[1],
        where="",
        value="",
        hint="this is a bug: please report it with the traceback of that rank",
    )


def _raise_reported(reports: Sequence[AutomodelError | None], error: BaseException | None) -> None:
    """Raise the error that all ranks raise if any of them reported one. *error* is the error of this rank."""
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    first = min(failed)
    raised = copy.copy(failed[first])
    raised.rank = first  # type: ignore[attr-defined]
    if len(failed) < len(reports) or len({str(report) for report in failed.values()}) > 1:
        head, *rest = raised.problems
        problems = [replace(head, what=f"rank {first}: {head.what}"), *rest]
        del failed[first]
        if failed:
            others = [f"rank {rank}: {each.problems[0].what}" for rank, each in failed.items()]
            problems.append(Problem("other ranks failed too", "; ".join(others), "", ""))
        raised.problems = tuple(problems)
    raise raised from error
