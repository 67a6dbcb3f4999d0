"""What tests rely on when they fork ranks from their own process."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import ranks

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="on a machine with a GPU no rank can train after a backward pass of its parent",
)


def gradient() -> float:
    weight = torch.ones((), requires_grad=True)
    (3 * weight).backward()
    assert weight.grad is not None
    return weight.grad.item()


@needs_no_gpu
def test_ranks_can_train_after_a_backward_pass_and_fake_tensors_in_the_process_that_forks_them() -> (
    None
):
    # With fake tensors a CUDA build of torch counts devices that this machine does not have.
    with FakeTensorMode():
        torch.empty(1)
    assert gradient() == 3.0
    assert ranks.run(gradient, 2, init=False) == [3.0, 3.0]


def test_ranks_that_wait_for_a_failed_one_are_killed_and_their_stacks_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "AFTER_FAILURE_SECONDS", 1.0)

    def rank_0_fails() -> None:
        if os.environ["RANK"] == "0":
            raise ValueError("this rank")
        waits_for_rank_0()

    def waits_for_rank_0() -> None:
        time.sleep(60)

    started = time.monotonic()
    failed, waiting = ranks.outcomes(rank_0_fails, 2, init=False)
    assert time.monotonic() - started < 30
    assert isinstance(failed.error, ValueError)
    assert (waiting.error, waiting.exitcode) == (None, None)
    assert not ranks.outcomes(waits_for_rank_0, 1, init=False, timeout=2)[0].ok
    assert "in waits_for_rank_0" in capfd.readouterr().err
