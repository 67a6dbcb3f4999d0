"""Which of several failure records the user gets to read."""

import contextlib
import sys
import time
from dataclasses import replace

import pytest

from automodel_ckpt.cli.launch.failures import (
    FailureRecord,
    failure_record,
    is_connection_error,
    name_silent_ranks,
    printed_failure,
)
from automodel_ckpt.errors import SaveFailed
from tests.support.runs.fake_train import raise_in

TORCH = "torch.distributed.distributed_c10d"


def raised(text: str, module: str) -> RuntimeError:
    """A RuntimeError that a ``raise`` statement in a module raised."""
    error = RuntimeError(text)
    with contextlib.suppress(RuntimeError):
        raise_in(module, error)
    return error


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
    assert (found.primary, found.timed_out) == (True, False)
    assert found.message == f"internal error: RuntimeError: tracking server: {text}"
    assert found.details


@pytest.mark.parametrize(
    ("text", "node"),
    [
        (
            "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::ffff:10.0.0.7]:471",
            "10.0.0.7",
        ),
        (
            "NCCL error: Last error: socketProgress: Connection closed by remote peer gpu7<471>",
            "gpu7",
        ),
    ],
)
def test_the_node_of_a_lost_rank_is_named(text: str, node: str) -> None:
    found = failure_record(raised(text, TORCH), 1)
    assert found.message.startswith(
        f"error: the connection to another rank on node {node} broke\n  where:  rank 1\n"
    )


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
