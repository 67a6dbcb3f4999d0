"""Which of several failure records the user gets to read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.cli.launch import failures
from automodel_ckpt.cli.launch.connection_errors import is_connection_error
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import (
    FailureRecord,
    death_record,
    early_stop_record,
    failure_record,
    failure_text,
    lost_connection_record,
    name_silent_ranks,
    printed_failure,
    root_cause,
)
from automodel_ckpt.cli.launch.peer_watch import unless_ended_by_agent
from automodel_ckpt.cli.launch.process_state import has_ended
from automodel_ckpt.cli.launch.store_linger import hang_grace_seconds, unreachable_grace_seconds
from automodel_ckpt.cli.launch.suspension_time import SuspensionTime
from automodel_ckpt.errors import RecipeError, SaveFailed
from tests.support.runs.fake_train import raise_in

TORCH = "torch.distributed.distributed_c10d"


def disk_full() -> SaveFailed:
    return SaveFailed("cannot write", where="shard", value="ENOSPC", hint="make room")


def record(time: float, rank: int, *, primary: bool = True, code: int = 1) -> FailureRecord:
    return FailureRecord(time, rank, code, f"rank {rank}", primary)


def raised(text: str, module: str) -> RuntimeError:
    """A RuntimeError that a ``raise`` statement in a module raised."""
    error = RuntimeError(text)
    with contextlib.suppress(RuntimeError):
        raise_in(module, error)
    return error


def called_in(module: str, text: str) -> RuntimeError:
    """A RuntimeError that compiled code raised, which a module called: here the C function of a generator's throw."""
    error = RuntimeError(text)
    with contextlib.suppress(RuntimeError):
        exec(
            compile("throw(error)", module, "exec"),
            {"__name__": module, "error": error, "throw": ended().throw},
        )
    return error


def ended() -> Any:
    """A generator that runs no code any more."""
    numbers = (number for number in ())
    numbers.close()
    return numbers


def test_the_earliest_primary_record_decides() -> None:
    first, later, echo = record(2, 1), record(3, 0), record(1, 2, primary=False)
    assert root_cause([later, echo, first]) is first
    assert root_cause([echo]) is echo
    assert root_cause([]) is None


def test_a_broken_connection_is_an_echo_and_so_is_what_it_caused() -> None:
    closed = raised(
        "[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:1", TORCH
    )
    assert not failure_record(closed, 0).primary
    wrapped = SaveFailed("cannot write", where="", value="", hint="")
    wrapped.__cause__ = closed
    assert not failure_record(wrapped, 0).primary
    assert failure_record(wrapped, 0).code == 4


def test_torchs_own_network_errors_are_echoes() -> None:
    import torch.distributed as dist

    assert is_connection_error(dist.DistNetworkError("reset"))
    assert is_connection_error(dist.DistBackendError("aborted"))
    gone = failure_record(
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), 1
    )
    assert (
        gone.message.startswith("error: the connection to another rank broke") and not gone.details
    )
    assert is_connection_error(
        raised("Read error: this is typically caused by a remote worker crashing.", TORCH)
    )
    assert not is_connection_error(raised("shape mismatch", TORCH))
    assert not is_connection_error(
        raised("this is typically caused by a remote worker hanging", TORCH)
    )
    assert not is_connection_error(ValueError("Connection closed by peer"))


@pytest.mark.parametrize(
    "module", ["__main__", "my_package.data", "torch._utils", "requests.adapters"]
)
@pytest.mark.parametrize(
    "text",
    [
        "Connection reset by peer",
        "gloo/ NCCL Broken pipe",
        "Timed out waiting 5ms",
        "connectFullMesh failed",
    ],
)
def test_an_exception_that_other_code_raises_is_no_lost_rank_whatever_its_text(
    module: str, text: str
) -> None:
    error = raised(f"tracking server: {text}", module)
    found = failure_record(error, 1)
    assert not is_connection_error(error)
    assert (found.primary, found.connected, found.timed_out) == (True, True, False)
    assert found.message == f"internal error: RuntimeError: tracking server: {text}"
    assert found.details


def test_only_a_backends_own_message_counts_where_other_code_calls_it() -> None:
    backend = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    assert is_connection_error(called_in("my_package", backend))
    assert is_connection_error(
        called_in("automodel_ckpt.parallel.ranks.agree", "Connection closed by peer")
    )
    assert not is_connection_error(called_in("my_package", "Connection closed by peer"))


def test_an_error_the_ranks_agreed_on_is_primary_where_it_began() -> None:
    error = disk_full()
    error.rank = 1  # type: ignore[attr-defined]
    assert [failure_record(error, rank).primary for rank in (0, 1)] == [False, True]
    assert failure_text(failure_record(error, 1), several_ranks=True) == f"error: {error}"


def test_a_message_names_its_rank_only_where_there_are_several() -> None:
    error = RecipeError("wrong", where="x", value=1, hint="y")
    assert failure_text(failure_record(error, 3), several_ranks=True).endswith("\n  rank:   3")
    assert "rank" not in failure_text(failure_record(error, 0), several_ranks=False)


def test_only_an_internal_error_carries_its_traceback() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        text = failure_text(failure_record(error, 0), several_ranks=False)
    assert text.startswith("Traceback")
    assert text.endswith("internal error: ValueError: boom")
    assert failure_record(disk_full(), 0).details == ""


def test_a_death_is_found_by_signal_or_exit_code() -> None:
    assert (
        death_record(1, -signal.SIGKILL, 0).message
        == "error: rank 1 was killed by SIGKILL (out of memory?)"
    )
    assert death_record(1, -signal.SIGSEGV, 0).message == "error: rank 1 was killed by SIGSEGV"
    assert (
        death_record(0, 7, 0).message
        == "error: rank 0 ended with exit code 7 before the run was done, without an error message"
    )
    assert death_record(0, -62, 0).message == "error: rank 0 was killed by signal 62"


def test_a_board_keeps_each_ranks_first_record_by_attempt(tmp_path: Path) -> None:
    failure_dir = FailureDirectory(tmp_path)
    nothing = (failure_dir.last_attempt(), failure_dir.records(0), failure_dir.stop_signals())
    assert nothing == (-1, [], b"")
    assert (failure_dir.records(-1), failure_dir.processes(-1)) == ([], {})
    failure_dir.register_process(0, 1)
    failure_dir.write(0, record(1, 1, code=4))
    failure_dir.write(0, record(2, 1, code=1))
    failure_dir.write(10, record(3, 0))
    assert failure_dir.records(0) == [record(1, 1, code=4)]
    assert failure_dir.processes(0) == {1: os.getpid()}
    failure_dir.write(9, record(4, 0))
    assert failure_dir.last_attempt() == 10
    failure_dir.record_signal(signal.SIGTERM)
    failure_dir.record_signal(signal.SIGINT)
    assert list(failure_dir.stop_signals()) == [signal.SIGTERM, signal.SIGINT]


def test_several_peers_that_see_the_same_end_record_it_without_disturbing_each_other(
    tmp_path: Path,
) -> None:
    failure_dir = FailureDirectory(tmp_path)

    def record_often(_: int) -> None:
        for number in range(200):
            failure_dir.record_store(0, "localhost", str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record_often, range(4)))
    assert failure_dir.store(0) == ("localhost", 199)
    assert [path.name for path in (tmp_path / "attempt_0").iterdir()] == ["store"]


def test_a_rank_that_the_agent_stopped_because_another_died_is_not_the_cause(
    tmp_path: Path,
) -> None:
    failure_dir = FailureDirectory(tmp_path)
    for attempt in (0, 1):
        failure_dir.register_process(attempt, 0)
        failure_dir.write(attempt, early_stop_record(0, signal.SIGTERM))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "attempt_1" / "rank_1.pid").write_text(str(ended.pid))
    stopped, died = failure_dir.cause_of_end(0), failure_dir.cause_of_end(1)
    assert stopped is not None and stopped.code == 75
    assert died is not None and (died.code, died.rank) == (1, 1)


def test_the_agents_signal_to_a_rank_whose_peer_lost_a_connection_is_no_stop(
    tmp_path: Path,
) -> None:
    """A rank of another node died in a restart: the agent ends the ranks of this node that did not notice it yet."""
    failure_dir = FailureDirectory(tmp_path)
    stop = early_stop_record(0, signal.SIGTERM)
    assert unless_ended_by_agent(failure_dir, 0, stop) == stop
    failure_dir.write(0, early_stop_record(1, 0))
    assert unless_ended_by_agent(failure_dir, 0, stop) == stop, "both are stopped by a user"
    lost = lost_connection_record(RuntimeError("closed"), 2, "to another rank", where="rank 2")
    failure_dir.write(0, lost)
    ended = unless_ended_by_agent(failure_dir, 0, stop)
    assert (ended.code, ended.primary) == (1, False)
    assert ended.message == "rank 0 was terminated because rank 2 failed"
    assert unless_ended_by_agent(failure_dir, 0, lost) == lost
    failure_dir.record_signal(signal.SIGTERM)
    assert unless_ended_by_agent(failure_dir, 0, stop) == stop, (
        "the launcher received a stop request"
    )


def test_an_ended_process_is_gone_before_its_parent_asked() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process.pid)
    process.wait(120)
    assert has_ended(process.pid)


def test_who_did_not_answer_is_named_and_is_another_machine_where_all_of_this_one_spoke() -> None:
    waited = FailureRecord(
        1.0, 0, 1, "internal error: Timed out waiting 12000ms", False, "Traceback", timed_out=True
    )
    found = {
        (ranks, is_all): name_silent_ranks(
            waited, [waited], ranks, is_all=is_all
        ).message.splitlines()[0]
        for ranks in ((0, 1), (0,))
        for is_all in (True, False)
    }
    assert found[(0, 1), True] == found[(0, 1), False] == "error: rank 1 did not respond in time"
    assert found[(0,), False] == "error: another node did not respond in time"
    assert found[(0,), True] == waited.message, (
        "ranks that wait for each other in vain: the traceback shows where"
    )


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_time_in_which_the_process_did_not_run_is_noted_until_some_time_after() -> None:
    clock, cpu = Clock(), Clock()
    found = SuspensionTime(clock, cpu)
    # Polls that are late on a busy machine, and in a process that computes.
    for seconds, cpu_seconds in ((1.1, 0.5), (4.0, 0.0), (90.0, 80.0)):
        clock.now += seconds
        cpu.now += cpu_seconds
        found.note()
        assert found.just_ended() == 0
    clock.now += 91
    found.note()
    assert found.just_ended() == 90
    clock.now += 1
    found.note()
    assert found.just_ended() == 90
    clock.now += 60
    assert found.just_ended() == 0


def test_a_rank_that_was_suspended_itself_says_so_where_its_wait_timed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, cpu = Clock(), Clock()
    monkeypatch.setattr(failures, "suspension", SuspensionTime(clock, cpu))
    error = raised("Timed out waiting 60000ms for recv operation to complete (gloo/)", TORCH)
    assert failure_record(error, 1).message.startswith("internal error: ")
    clock.now = 91.0
    failures.suspension.note()
    found = failure_record(error, 1)
    assert found.message.startswith(
        "error: the ranks were suspended for longer than the timeout of collectives"
    )
    assert "rank 1 did not run for 1 min 30 s" in found.message and not found.details
    assert (found.primary, found.timed_out, found.was_suspended) == (False, True, True)
    # All ranks have failed, and no other node is the cause.
    assert name_silent_ranks(found, [found], (1,), is_all=False) == found
    broken = raised("Connection closed by peer (gloo/)", TORCH)
    assert "connection to another rank broke" in failure_record(broken, 1).message


def test_a_failure_after_log_lines_begins_with_its_time_as_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = FailureRecord(0.0, 1, 1, "internal error: x", details="Traceback\n")
    assert (
        printed_failure(record, several_ranks=True) == "Traceback\ninternal error: x\n  rank:   1"
    )
    when = time.mktime((2026, 11, 23, 3, 30, 5, 0, 0, -1))
    record = replace(record, time=when, follows_log=True)
    text = "Traceback\n2026-11-23 03:30:05 internal error: x\n  rank:   1"
    assert printed_failure(record, several_ranks=True) == text
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert printed_failure(record, several_ranks=False) == "Traceback\n03:30:05 internal error: x"


@pytest.mark.parametrize(
    ("node", "num_nodes", "expected"),
    [
        ("0", "1", (False, False)),
        ("0", "2", (True, False)),
        ("0", "3", (True, True)),
        ("1", "3", (False, False)),
        ("0", None, (False, False)),
        (None, None, (False, False)),
    ],
)
def test_only_the_first_node_waits_for_nodes_that_can_still_read_a_failure(
    node: str | None,
    num_nodes: str | None,
    expected: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a hang, there is another node; after one does not respond, there is a third one."""
    for name, value in (("GROUP_RANK", node), ("GROUP_WORLD_SIZE", num_nodes)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert (hang_grace_seconds() > 0, unreachable_grace_seconds() > 0) == expected
