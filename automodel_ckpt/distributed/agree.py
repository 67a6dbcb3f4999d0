"""What the ranks of a group must know of each other: one object from all, one object to all, all or nothing.

Every function is a collective: each rank of the group calls it, in the same order. The group is a gloo group, so that
nothing waits for a GPU. A group of one rank costs nothing, and neither does ``None``, which stands for it where no
process group exists. Objects travel pickled: the ranks of one run trust each other.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from automodel_ckpt.errors import AutomodelError, Problem, describe, limit_error

T = TypeVar("T")

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.005, 0.5


def gather_objects(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Every rank's ``value``, by rank in the group; the same list on all ranks."""
    if size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(group: dist.ProcessGroup | None, value: T, source: int = 0) -> T:
    """``value`` of the rank ``source`` (its rank in the group); what the others pass is ignored."""
    if size(group) == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    received: T = box[0]
    return received


def sum_over_ranks(group: dist.ProcessGroup | None, *values: float) -> list[float]:
    """The sums of a few numbers over the ranks, in float64 (exact for counts below 2**53); the same on all ranks."""
    if size(group) == 1:
        return [float(value) for value in values]
    vector = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(vector, group=group)
    sums: list[float] = vector.tolist()
    return sums


def on_all_ranks(group: dist.ProcessGroup | None, holds: bool) -> bool:
    """Whether *holds* is true on every rank; the same on all ranks."""
    return sum_over_ranks(group, holds)[0] == size(group)


def all_or_nothing(group: dist.ProcessGroup | None, error: BaseException | None) -> None:
    """Return on all ranks when no rank passes an error; else raise on all.

    What is raised is the error of the first failing rank: of its class where that is an :class:`AutomodelError`, else
    an :class:`AutomodelError`; it names the rank, and the others that failed with their own reasons in a line each.
    Its attribute ``rank`` (the first failing rank of the group) tells the failure's origin from its echoes. The origin
    keeps the original exception as ``__cause__``.
    """
    if size(group) == 1:
        if error is not None:
            raise error
        return
    reports = gather_objects(group, None if error is None else _portable(error))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if failed:
        raise _combined(failed, len(reports)) from error


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
        if convert is not None:
            failure = convert(error)
        elif isinstance(error, AutomodelError | OSError):
            failure = error
        else:
            raise
    all_or_nothing(group, failure)


def while_working(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Call *work*, which may take any time, and return its value when every rank's is done.

    No collective waits for it, so that none runs into the group's timeout: the ranks meet every half second. What it
    raises is raised here, when all are done, and on this rank only (see :func:`all_or_nothing`).
    """
    if size(group) == 1:
        return work()
    with ThreadPoolExecutor(1, "while-working") as pool:
        done = pool.submit(work)
        pause = _FIRST_PAUSE_SECONDS
        while not all(gather_objects(group, done.done())):
            wait([done], timeout=pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
    return done.result()


def size(group: dist.ProcessGroup | None) -> int:
    """How many ranks the group has."""
    return 1 if group is None else dist.get_world_size(group)


def _portable(error: BaseException) -> AutomodelError:
    """The error as one that every rank can unpickle; a foreign exception becomes its message."""
    if isinstance(error, AutomodelError):
        bare = copy.copy(error)
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


def _combined(failed: Mapping[int, AutomodelError], num_ranks: int) -> AutomodelError:
    first = min(failed)
    error = copy.copy(failed[first])
    texts = {str(other) for other in failed.values()}
    if len(failed) < num_ranks or len(texts) > 1:
        error.problems = _named(first, failed)
    error.rank = first  # type: ignore[attr-defined]
    return error


def _named(first: int, failed: Mapping[int, AutomodelError]) -> tuple[Problem, ...]:
    head, *rest = failed[first].problems
    named = Problem(f"rank {first}: {head.what}", head.where, head.value, head.hint)
    others = [
        f"rank {rank}: {error.problems[0].what}" for rank, error in failed.items() if rank != first
    ]
    also = [Problem("other ranks failed too", "; ".join(others), "", "")] if others else []
    return (named, *rest, *also)
