"""Learning-rate schedules over the optimizer steps of a run: transformers' by name, and checks of others."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

_MAX_AUTOMATIC_WARMUP = 1000


def build_schedule(
    optimizer: Optimizer,
    name: str,
    *,
    total_steps: int | None,
    warmup_steps: int | str | None = None,
    warmup_ratio: float | None = None,
    warmup_from: float = 0.0,
    decay_steps: int | None = None,
    kwargs: Values | None = None,
    warns: bool = True,
) -> LRScheduler:
    """Build the schedule *name* over *decay_steps* (default: *total_steps*), which include the warm-up.

    *warmup_steps* is a number, or ``auto``: a tenth of *total_steps*, rounded down, and at most 1000. The warm-up
    begins at the fraction *warmup_from* of the rate. The warm-up of *warmup_ratio* is
    rounded up, as in transformers. With *warns*, a warm-up that is longer than the run is logged.
    Raises :class:`RecipeError` if the schedule requires an unknown length (a stream without max_steps), or does not
    accept *kwargs*.
    """
    # Imported here, because these modules import half of transformers' trainer and peft.
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
    from transformers.trainer_utils import SchedulerType

    length = decay_steps or total_steps
    function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    parameters = inspect.signature(function).parameters
    warms_up, decays = "num_warmup_steps" in parameters, "num_training_steps" in parameters
    unused: ValueDict = {}
    if not warms_up:
        unused = {"warmup_steps": warmup_steps, "warmup_ratio": warmup_ratio}
        unused["warmup_from"] = warmup_from or None
    if not decays and warmup_ratio is None:
        unused["decay_steps"] = decay_steps
    for key, value in unused.items():
        if value is not None:
            raise RecipeError(
                f"the schedule {name} does not use {key}",
                where=f"lr_scheduler.{key}",
                value=value,
                hint="remove it, or choose another schedule",
            )
    if length is None and (decays or warmup_ratio is not None):
        raise RecipeError(
            "this schedule requires the number of steps, which the data set does not define",
            where="lr_scheduler.name",
            value=name,
            hint="set step_scheduler.max_steps or lr_scheduler.decay_steps, or use the schedule constant",
        )
    warmup = _warmup(warmup_steps, total_steps)
    if warmup_ratio is not None and length is not None:
        warmup = math.ceil(length * warmup_ratio)
    if warns and total_steps is not None and warmup >= total_steps > 1:
        log.warning(
            "the learning rate does not reach its peak: it warms up for %d steps, and the run has %d "
            "(lr_scheduler.warmup_steps)",
            warmup,
            total_steps,
        )
    # get_scheduler ignores what the constant schedules do not accept. last_epoch belongs to the checkpoint.
    unknown = sorted((kwargs or {}).keys() - (parameters.keys() - {"last_epoch"}))
    try:
        if unknown:
            raise TypeError(f"{name} has no argument {', '.join(unknown)}")
        schedule: LRScheduler = get_scheduler(name, optimizer, warmup, length, dict(kwargs or {}))
        if warmup_from and isinstance(schedule, LambdaLR):
            factors: list[Callable[[int], float]] = [
                partial(_raised, each, warmup, warmup_from) for each in schedule.lr_lambdas
            ]
            # A partial has the state of transformers' own factors: none.
            schedule.lr_lambdas = factors
            follow_schedule(schedule)
        # Errors in the values must not appear only after the warm-up.
        for factor in getattr(schedule, "lr_lambdas", ()):
            factor(warmup)
            factor(length or warmup + 1)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise RecipeError(
            f"the schedule {name} cannot be computed with these values",
            where="lr_scheduler.kwargs",
            value=f"{dict(kwargs or {})} ({type(error).__name__}: {error})",
            hint="correct them, or remove them to use the schedule's defaults",
        ) from error
    return schedule


def _warmup(steps: int | str | None, total_steps: int | None) -> int:
    """The number of steps of the warm-up; *steps* and *total_steps* are arguments of :func:`build_schedule`."""
    if steps != "auto":
        return int(steps or 0)
    if total_steps is None:
        raise RecipeError(
            "this warm-up requires the number of steps of the run, which the data set does not define",
            where="lr_scheduler.warmup_steps",
            value="auto",
            hint="set step_scheduler.max_steps, or the number of steps of the warm-up",
        )
    return min(_MAX_AUTOMATIC_WARMUP, total_steps // 10)


def _raised(factor: Callable[[int], float], warmup: int, start: float, step: int) -> float:
    """The factor of a schedule at *step*, if its warm-up of *warmup* steps begins at *start* instead of 0."""
    value = float(factor(step))
    if step >= warmup:
        return value
    return start + (1 - start) * value


def check_scalable(optimizer: Optimizer) -> None:
    """Raise :class:`RecipeError` if *optimizer* has no learning rates that a schedule could scale."""
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise RecipeError(
            "the optimizer sets its own learning rates, which a schedule cannot scale",
            where="lr_scheduler",
            value=f"{type(optimizer).__name__} without lr",
            hint="remove the section lr_scheduler, or set optimizer.lr (Adafactor: and relative_step: false)",
        )


def check_schedule(schedule: object) -> None:
    """Raise :class:`RecipeError` unless *schedule* is a schedule of torch that depends on nothing but the step."""
    if not isinstance(schedule, LRScheduler):
        raise RecipeError(
            "the schedule is not a torch.optim.lr_scheduler.LRScheduler",
            where="lr_scheduler",
            value=type(schedule).__name__,
            hint="return one from this section's function or class",
        )
    parameters = inspect.signature(schedule.step).parameters.values()
    if needed := [p.name for p in parameters if p.default is p.empty]:
        raise RecipeError(
            "this schedule needs more than the step",
            where="lr_scheduler",
            value=f"{type(schedule).__name__}.step({', '.join(needed)})",
            hint="use another schedule; step_scheduler.early_stopping ends a run that no longer improves",
        )


def follow_schedule(schedule: LambdaLR) -> None:
    """Set the learning rates that *schedule* has at its current step.

    A loaded state contains the rates of the schedule that saved it, which may have been another one.
    """
    rates = [
        base * factor(schedule.last_epoch)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    # What get_last_lr() returns; LRScheduler has no setter.
    schedule._last_lr = rates


def fast_forward(schedule: LRScheduler, num_steps: int) -> None:
    """Set a new *schedule* and the learning rates of its optimizer to their state after *num_steps* steps."""
    if isinstance(schedule, LambdaLR):
        # LambdaLR computes rates from last_epoch alone. step() would warn if the count did not match.
        schedule.last_epoch = num_steps
        schedule._step_count = num_steps + 1
        follow_schedule(schedule)
        return
    with warnings.catch_warnings():
        # torch warns because no step of the optimizer precedes these.
        warnings.simplefilter("ignore")
        for _ in range(num_steps):
            schedule.step()
