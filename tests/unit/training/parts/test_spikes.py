"""When a step is a spike, and what checkpoints store of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from automodel_ckpt.config.keys.step_scheduler import OnSpikeConfig
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.training.counters.rules import SpikeDetector

RULE = OnSpikeConfig(
    loss_factor=2.0, grad_norm_factor=10.0, window=4, rollback=1, skip=1, max_rollbacks=3
)


def filled(rule: OnSpikeConfig = RULE) -> SpikeDetector:
    """A detector whose medians are 2.5 for the loss and 1 for the gradient norm."""
    detector = SpikeDetector(rule)
    for step, loss in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        assert detector.note(step, loss, 1.0) is None
    return detector


@pytest.mark.parametrize(
    ("median", "factor", "ordinary", "spike"),
    [
        (-4.0, 2.0, (-9.0, -4.0, -0.1), 0.1),
        (-4.0, 3.0, (-1.0, 4.0), 4.1),
        (0.0, 2.0, (1e-9, 1e9), None),
    ],
)
def test_the_loss_of_a_window_can_be_negative_or_zero(
    median: float, factor: float, ordinary: tuple[float, ...], spike: float | None
) -> None:
    """Robust DPO's falls below zero, and hinge's reaches zero."""
    rule = replace(RULE, loss_factor=factor)
    for loss in ordinary:
        detector = SpikeDetector(rule)
        for step in range(1, 5):
            detector.note(step, median, 1.0)
        assert detector.note(5, loss, 1.0) is None
    if spike is not None:
        detector = SpikeDetector(rule)
        for step in range(1, 5):
            detector.note(step, median, 1.0)
        found = detector.note(5, spike, 1.0)
        assert found is not None
        assert found.reason.endswith(f", the limit at the median {median:g} of 4 steps")


def test_a_value_that_is_not_finite_is_a_spike_from_the_first_step() -> None:
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf)):
        assert SpikeDetector(RULE).note(1, loss, norm) is not None
    without_limits = replace(RULE, loss_factor=None, grad_norm_factor=None)
    assert filled(without_limits).note(5, 1e9, 1e9) is None


def trained_batches(
    bad: set[int], rule: OnSpikeConfig, every: int = 5, kill_at: int = 0
) -> list[int]:
    """Train 20 steps with a checkpoint every *every* steps; return the numbers of the batches that were trained on.

    The loss of a *bad* batch is a spike. At the first step *kill_at*, the run is killed, and resumed from the newest
    checkpoint.
    """
    detector = SpikeDetector(rule)
    checkpoints = {0: (0, detector.state_dict())}
    batches: list[int] = []
    step = consumed = 0
    while step < 20:
        num_skipped = detector.num_to_skip(step)
        detector.num_skipped += num_skipped
        consumed += num_skipped + 1
        step += 1
        batches.append(consumed)
        spike = detector.note(step, 9.0 if consumed in bad else 1.0, 1.0)
        if spike is not None:
            target, left_out = step - rule.rollback, list(detector.left_out)
            num_rollbacks = detector.num_rollbacks + 1
            assert num_rollbacks <= rule.max_rollbacks
            step = max(each for each in checkpoints if each <= target)
        if step == kill_at:
            kill_at, step = 0, max(checkpoints)
            spike = None
            detector = SpikeDetector(rule)
            consumed, state = checkpoints[step]
            detector.load_state_dict(state)
        elif spike is not None:
            consumed, state = checkpoints[step]
            detector.load_state_dict(state)
            detector.num_rollbacks = num_rollbacks
            detector.leave_out(target, left_out)
            checkpoints = {each: checkpoints[each] for each in checkpoints if each <= step}
        elif step % every == 0:
            checkpoints[step] = (consumed, detector.state_dict())
        batches = batches[:step]
    return batches


@pytest.mark.parametrize("kill_at", [0, 13, 17])
@pytest.mark.parametrize("bad", [{9}, {9, 10}, {9, 10, 11}, {8, 12}, {12, 9, 10, 17}])
def test_batches_that_were_left_out_stay_so(bad: set[int], kill_at: int) -> None:
    rule = replace(RULE, max_rollbacks=5)
    expected = [number for number in range(1, 30) if number not in bad][:20]
    assert trained_batches(bad, rule, kill_at=kill_at) == expected


def test_the_last_batch_that_is_left_out_is_that_of_the_spike() -> None:
    rule = replace(RULE, rollback=3, skip=3)
    # The batches 10 to 12, and then those of the steps 8 and 9 before the one of batch 13.
    expected = [*range(1, 8), *range(14, 40)][:20]
    assert trained_batches({12, 13}, rule) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"losses": "1"},
        {"losses": [math.nan]},
        {"grad_norms": [True]},
        {"num_rollbacks": -1},
        {"num_rollbacks": None},
        {"num_skipped": True},
        {"left_out": [-1]},
        {"left_out": 3},
    ],
)
def test_an_impossible_state_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointUnusable, match="step counters"):
        SpikeDetector(RULE).load_state_dict(filled().state_dict() | change)
