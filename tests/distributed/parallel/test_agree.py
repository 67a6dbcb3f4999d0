"""The ranks agree: one error on one rank is the same error, with its rank, on all."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, SaveFailed
from automodel_ckpt.parallel.ranks.agree import (
    all_or_nothing,
    broadcast_object,
    gather_objects,
    gather_or_raise,
    while_working,
)
from tests.support import ranks


class Collectives(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def disk_full(rank: int) -> SaveFailed:
    return SaveFailed(
        "cannot write", where=f"shard-{rank}", value="ENOSPC (No space left)", hint="make room"
    )


def raised_by(errors: dict[int, BaseException]) -> list[BaseException]:
    """What every one of 3 ranks raises when the ranks in `errors` report these errors."""

    def rank() -> None:
        all_or_nothing(dist.group.WORLD, errors.get(dist.get_rank()))

    ended = [outcome.error for outcome in ranks.outcomes(rank, 3)]
    return [error for error in ended if error is not None]


def test_when_no_rank_fails_all_go_on() -> None:
    assert raised_by({}) == []


def test_one_ranks_error_is_raised_on_all_with_class_rank_and_code() -> None:
    errors = raised_by({1: disk_full(1)})
    assert [type(error) for error in errors] == [SaveFailed] * 3
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("rank 1: cannot write\n  where:  shard-1\n")
    assert [getattr(error, "rank", None) for error in errors] == [1, 1, 1]
    assert [error.exit_code for error in errors if isinstance(error, AutomodelError)] == [4, 4, 4]


def test_several_failing_ranks_are_all_named_and_the_first_one_decides() -> None:
    error = raised_by(
        {2: CheckpointUnusable("torn", where="x", value="", hint="y"), 1: disk_full(1)}
    )[0]
    assert isinstance(error, SaveFailed)
    assert str(error).splitlines()[0] == "rank 1: cannot write"
    assert "other ranks failed too\n  where:  rank 2: torn" in str(error)


def test_different_errors_on_all_ranks_are_all_named() -> None:
    errors = {
        rank: SaveFailed(f"cannot write part {rank}", where=f"shard-{rank}", value="EIO", hint="")
        for rank in range(3)
    }
    text = str(raised_by(dict(errors))[0])
    assert text.splitlines()[0] == "rank 0: cannot write part 0"
    assert "rank 1: cannot write part 1; rank 2: cannot write part 2" in text


def test_the_same_error_on_all_ranks_is_reported_without_ranks() -> None:
    same = SaveFailed("cannot write", where="checkpoints/", value="EACCES", hint="chmod")
    assert [str(error) for error in raised_by(dict.fromkeys(range(3), same))] == [str(same)] * 3


def test_a_foreign_exception_that_cannot_be_pickled_reaches_the_others_as_its_message() -> None:
    class Local(ValueError):
        pass

    errors = raised_by({0: Local("odd")})
    assert [type(error) for error in errors] == [AutomodelError] * 3
    assert "rank 0: internal error: Local: odd" in str(errors[2])


def test_a_foreign_exception_is_the_cause_on_the_rank_it_happened_on() -> None:
    def rank() -> str:
        try:
            all_or_nothing(dist.group.WORLD, OSError(28, "full") if dist.get_rank() == 1 else None)
        except AutomodelError as error:
            return type(error.__cause__).__name__
        return "nothing raised"

    assert ranks.run(rank, 2) == ["NoneType", "OSError"]


def test_gather_and_broadcast_carry_any_object_of_any_size() -> None:
    # An object of 248 bytes needs one collective, a larger one a second one. Pickling adds some bytes.
    lengths = [0, *range(200, 260), 5_000]

    def rank() -> tuple[list[object], list[object], list[int]]:
        me = dist.get_rank()
        gathered, received, counts = [], [], []
        for length in lengths:
            with Collectives() as collectives:
                # Ranks whose objects differ in their size.
                gathered.append(
                    gather_objects(dist.group.WORLD, {"rank": me, "text": "x" * length * me})
                )
                received.append(broadcast_object(dist.group.WORLD, "y" * length if me else None, 1))
            counts.append(collectives.count)
        return gathered, received, counts

    expected = []
    for length in lengths:
        expected.append([{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * length}])
    for gathered, received, counts in ranks.run(rank, 2):
        assert gathered == expected
        assert received == ["y" * length for length in lengths]
        assert counts[0] == 2 and counts[-1] == 4


def test_results_are_gathered_or_one_ranks_error_is_raised_on_all() -> None:
    def rank() -> tuple[list[int], str, type[BaseException]]:
        me = dist.get_rank()
        results = gather_or_raise(dist.group.WORLD, lambda: 10 * me)
        with pytest.raises(AutomodelError, match="rank 1: cannot write") as caught:
            gather_or_raise(dist.group.WORLD, lambda: 1 // (1 - me), lambda error: disk_full(1))
        return results, str(caught.value), type(caught.value)

    (results, message, kind), other = ranks.run(rank, 2)
    assert (results, kind) == ([0, 10], SaveFailed)
    assert (results, message, kind) == other


def test_broadcast_counts_ranks_within_the_group() -> None:
    def rank() -> object:
        group = dist.new_group([1, 2], backend="gloo")
        return broadcast_object(group, dist.get_rank(), 0) if dist.get_rank() > 0 else None

    assert ranks.run(rank, 3) == [None, 1, 1]


def test_one_rank_needs_no_group() -> None:
    assert gather_objects(None, 7) == [7]
    assert broadcast_object(None, "x") == "x"
    assert gather_or_raise(None, lambda: 8) == [8]
    all_or_nothing(None, None)
    with pytest.raises(SaveFailed, match="cannot write"):
        gather_or_raise(None, lambda: 1 // 0, lambda error: disk_full(0))
    with pytest.raises(ValueError, match="odd"):
        all_or_nothing(None, ValueError("odd"))


def test_the_helper_itself_reports_errors_deaths_and_time_outs() -> None:
    def rank() -> str:
        number = int(os.environ["RANK"])
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1:
            raise KeyError("missing")
        if number == 2:
            signal.pause()
        return "fine"

    killed, raised, hung, fine = ranks.outcomes(rank, 4, timeout=4, init=False)
    assert (killed.exitcode, killed.error, killed.ok) == (-signal.SIGKILL, None, False)
    assert isinstance(raised.error, KeyError)
    assert "missing" in raised.traceback
    assert hung.exitcode is None
    assert fine.value == "fine"
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised:.*KeyError"):
        ranks.run(rank, 2, timeout=5, init=False)


def test_work_that_takes_longer_than_the_groups_timeout_is_waited_for() -> None:
    def rank() -> tuple[int, str]:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4))
        number = dist.get_rank()
        calls: list[int] = []
        value = while_working(
            group, lambda: time.sleep(6 * number) or number, lambda: calls.append(1)
        )
        # The rank that is done takes care meanwhile of what the other one waits for.
        assert 1 < len(calls) < 20
        try:
            while_working(group, lambda: 1 // number)
        except ZeroDivisionError as error:
            return value, str(error)
        return value, ""

    def stopped() -> float:
        group = dist.new_group(backend="gloo")
        ended = threading.Event()

        def meanwhile() -> None:
            raise KeyboardInterrupt  # as a stop request does

        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            while_working(group, lambda: ended.wait(60), meanwhile, ended.set)
        return time.monotonic() - started

    assert ranks.run(rank, 2) == [(0, "integer division or modulo by zero"), (1, "")]
    assert max(ranks.run(stopped, 2)) < 30
    assert while_working(None, lambda: 7) == 7
