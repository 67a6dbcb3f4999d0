"""What a resumed run goes on with otherwise than its recipe says: an optimizer's options and rates are state."""

from __future__ import annotations

import logging
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from automodel_ckpt.training.lr import current_rate, follow_schedule
from automodel_ckpt.training.step_scheduler import StepScheduler

log = logging.getLogger("automodel_ckpt")


class RecipeOptions:
    """The options and peak learning rates of an optimizer as the recipe has them: made before a checkpoint is loaded
    into it and its *schedule* (None: a constant rate)."""

    def __init__(self, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._rates: list[Any] = list(schedule.base_lrs) if schedule is not None else []
        self._options = self._now()

    def compare(self, scheduler: StepScheduler) -> None:
        """After loading: say in the log what goes on as it was saved, and follow a schedule that the recipe changed."""
        self._say_kept_options()
        if self._schedule is not None:
            self._follow(self._schedule, scheduler)

    def _now(self) -> list[dict[str, list[float]]]:
        """The numbers among the options of each parameter group; the learning rate only where no schedule moves it."""
        moved = () if self._schedule is None else ("lr", "initial_lr")
        return [{name: numbers for name, value in group.items() if name not in moved and (numbers := _numbers(value))}
                for group in self._optimizer.param_groups]  # fmt: skip

    def _say_kept_options(self) -> None:
        for number, (new, kept) in enumerate(zip(self._options, self._now(), strict=False)):
            where = f" of parameter group {number}" if len(self._options) > 1 else ""
            for name in (name for name in new if name in kept and new[name] != kept[name]):
                log.warning("the optimizer's %s%s goes on as saved, %s; the recipe's %s is for new runs", name, where,
                            _shown(kept[name]), _shown(new[name]))  # fmt: skip

    def _follow(self, schedule: LRScheduler, scheduler: StepScheduler) -> None:
        if self._rates != schedule.base_lrs:
            log.warning("the peak learning rate goes on as saved, %s; the recipe's %s is for new runs",
                        schedule.base_lrs, self._rates)  # fmt: skip
        saved = current_rate(self._optimizer)
        if isinstance(schedule, LambdaLR):
            follow_schedule(schedule)
        now = current_rate(self._optimizer)
        if now != saved and not scheduler.is_finished():
            planned = f" (the run was planned for {scheduler.planned_before} steps, now for {scheduler.planned_steps})"
            why = planned if scheduler.planned_before != scheduler.planned_steps else ""
            message = "the schedule changed%s: the learning rate of step %d is %.6g, it would have been %.6g"
            log.warning(message, why, scheduler.step + 1, now, saved)


def _numbers(value: Any) -> list[float]:
    """A number, or several, as a list; empty for anything else, and for switches."""
    values = value if isinstance(value, tuple | list) else [value]
    numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    return numbers if len(numbers) == len(values) else []


def _shown(numbers: list[float]) -> str:
    return str(numbers[0] if len(numbers) == 1 else numbers)
