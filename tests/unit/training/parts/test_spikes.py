"""When a step is a spike, and what checkpoints store of it."""

import math
from dataclasses import replace

import pytest

from automodel_ckpt.config.keys.ranks_and_steps import OnSpikeConfig
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
