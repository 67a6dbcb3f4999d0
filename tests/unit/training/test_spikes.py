"""When a step is a spike, and what checkpoints store of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.training.spikes import SpikeDetector, SpikeRule

RULE = SpikeRule(
    loss_factor=2.0, grad_norm_factor=10.0, window=4, rollback=1, skip=1, max_rollbacks=3
)


def filled(rule: SpikeRule = RULE) -> SpikeDetector:
    """A detector whose medians are 2.5 for the loss and 1 for the gradient norm."""
    detector = SpikeDetector(rule)
    for step, loss in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        assert detector.note(step, loss, 1.0) is None
    return detector


def test_a_value_above_its_limit_is_a_spike_once_the_window_is_full() -> None:
    assert SpikeDetector(RULE).note(1, 1e9, 1e9) is None
    assert filled().note(5, 5.0, 10.0) is None
    spike = filled().note(5, 5.01, 1.0)
    assert spike is not None and spike.step == 5
    assert spike.reason == "the loss 5.01 is above 2 times the median 2.5 of 4 steps"
    spike = filled().note(5, 1.0, 10.5)
    assert spike is not None and "the gradient norm 10.5 is above 10 times" in spike.reason


def test_a_value_that_is_not_finite_is_a_spike_from_the_first_step() -> None:
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf)):
        assert SpikeDetector(RULE).note(1, loss, norm) is not None
    without_limits = replace(RULE, loss_factor=None, grad_norm_factor=None)
    assert filled(without_limits).note(5, 1e9, 1e9) is None


def test_a_value_without_a_limit_that_is_not_finite_can_be_saved() -> None:
    detector = SpikeDetector(replace(RULE, loss_factor=None))
    assert detector.note(1, math.nan, 1.0) is None
    SpikeDetector(RULE).load_state_dict(detector.state_dict())


def test_a_spike_does_not_enter_the_window() -> None:
    detector = filled()
    assert detector.note(5, 100.0, 1.0) is not None
    assert detector.note(5, 6.0, 1.0) is not None


def test_a_restored_detector_decides_as_the_saved_one() -> None:
    detector = filled()
    detector.num_rollbacks, detector.skip_after = 2, 3
    restored = SpikeDetector(RULE)
    restored.load_state_dict(detector.state_dict())
    assert restored.state_dict() == detector.state_dict()
    assert restored.note(5, 5.01, 1.0) == detector.note(5, 5.01, 1.0) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"losses": "1"},
        {"losses": [math.nan]},
        {"grad_norms": [True]},
        {"num_rollbacks": -1},
        {"num_rollbacks": None},
        {"skip_after": 1.5},
    ],
)
def test_an_impossible_state_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointUnusable, match="on_spike"):
        SpikeDetector(RULE).load_state_dict(filled().state_dict() | change)
