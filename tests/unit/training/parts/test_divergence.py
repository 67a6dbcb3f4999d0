"""What a run does about spikes and steps that are not finite, without a model: which steps count, and when it ends."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.errors import TrainingDiverged
from automodel_ckpt.training.counters.cadence import Cadence, Due
from automodel_ckpt.training.counters.spikes import SpikeRule
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.values.records import ReportedStep
from automodel_ckpt.training.watch.divergence import Divergence

RULE = SpikeRule(2.0, None, window=2, rollback=1, skip=3, max_rollbacks=2)


class Run:
    """A run that has checkpoints or not."""

    def __init__(
        self, *, has_checkpoint: bool, limit: int | None = 2, planned: int | None = 100
    ) -> None:
        cadence = Cadence(max_steps=100, on_spike=RULE, stop_after_nonfinite_steps=limit)
        self.scheduler = StepScheduler(cadence, planned_steps=planned)
        self.targets: list[int] = []
        self._found = SimpleNamespace(step=1) if has_checkpoint else None
        logs: Any = SimpleNamespace(
            timeline=SimpleNamespace(phase=lambda _: nullcontext()), roll_back=lambda *_: None
        )
        self.saves: Any = SimpleNamespace(
            roll_back=self._roll_back, wait=lambda: None, last_save=None, resumed=None
        )
        self.divergence = Divergence(self.scheduler, self.saves, logs)

    def _roll_back(self, target: int) -> Any:
        self.targets.append(target)
        return self._found

    def judge(self, step: int, loss: float, grad_norm: float = 1.0) -> None:
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.divergence.judge(
            ReportedStep(step, loss, grad_norm, 0.1, has_labels=True, is_finite=is_finite)
        )


def test_a_run_goes_back_and_forgets_the_steps_after_the_spike() -> None:
    run = Run(has_checkpoint=True)
    for step, loss in enumerate((1.0, 1.0, 9.0, math.nan, math.nan), start=1):
        run.judge(step, loss)
    assert run.divergence.go_back()
    assert (run.targets, run.scheduler.nonfinite_steps) == ([2], 0)
    assert not run.divergence.found_spike
    assert not run.divergence.go_back()


def test_without_a_checkpoint_the_steps_after_the_spike_are_judged_too() -> None:
    run = Run(has_checkpoint=False)
    for step, loss in enumerate((1.0, 1.0, 9.0, 1.0, 8.0, 1.0), start=1):
        run.judge(step, loss)
    assert not run.divergence.go_back()
    # The steps before the spikes of steps 3 and 5.
    assert run.targets == [2, 4]
    assert run.scheduler.spikes is not None and run.scheduler.spikes.num_rollbacks == 0


def test_a_spike_counts_as_not_finite_by_what_has_no_limit_too() -> None:
    run = Run(has_checkpoint=False)
    for step in (1, 2):
        run.judge(step, 1.0)
    # The loss is a spike; the gradient norm, for which the rule has no limit, is infinite.
    run.judge(3, 9.0, math.inf)
    run.divergence.go_back()
    assert run.scheduler.nonfinite_steps == 1
    with pytest.raises(TrainingDiverged, match="2 consecutive steps, the last of which is step 4"):
        run.judge(4, 1.0, math.inf)


def test_too_many_spikes_end_the_run() -> None:
    run = Run(has_checkpoint=True)
    for step in (1, 2):
        run.judge(step, 1.0)
    for _ in range(RULE.max_rollbacks):
        run.judge(3, 9.0)
        assert run.divergence.go_back()
    run.judge(3, 9.0)
    with pytest.raises(TrainingDiverged, match="step 3 is a spike, after 2 rollbacks"):
        run.divergence.go_back()


@pytest.mark.parametrize(("planned", "last"), [(100, 10), (None, 10), (3, 3)])
def test_a_new_run_without_any_finite_step_is_an_error(planned: int | None, last: int) -> None:
    run = Run(has_checkpoint=False, limit=None, planned=planned)
    due = Due(validate=False, save=True, last=False, stop=False)
    for step in range(1, last):
        run.judge(step, math.nan, math.nan)
        # Each is a spike, too, before which there is no checkpoint.
        assert not run.divergence.go_back()
        assert run.divergence.postpones_save(due)
    run.judge(last, math.nan, math.nan)
    with pytest.raises(TrainingDiverged, match=f"no weight has changed(.|\\n)*first {last} steps"):
        run.divergence.go_back()


def test_a_run_with_a_finite_step_or_a_resumed_one_continues_without_a_limit() -> None:
    run = Run(has_checkpoint=False, limit=None)
    run.judge(1, 1.0)
    for step in range(2, 30):
        run.judge(step, math.nan)
        run.divergence.go_back()
    assert not run.divergence.postpones_save(Due(validate=False, save=True, last=False, stop=False))
    run = Run(has_checkpoint=False, limit=None)
    run.saves.resumed = SimpleNamespace(step=1)
    for step in range(2, 30):
        run.judge(step, math.nan)
        run.divergence.go_back()
    # The loss is only reported, and gradients that are finite change the weights.
    run = Run(has_checkpoint=False, limit=None)
    for step in range(1, 30):
        run.judge(step, math.inf)
        run.divergence.go_back()
