"""Learning-rate schedules of transformers, over the optimizer steps of the whole run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from automodel_ckpt.errors import RecipeError

_FILLED = frozenset({"optimizer", "last_epoch", "num_warmup_steps", "num_training_steps"})


def build_schedule(
    optimizer: Optimizer,
    name: str,
    *,
    total_steps: int | None,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    decay_steps: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """The schedule *name* over *decay_steps* (default: *total_steps*), warm-up included.

    Raises :class:`RecipeError` when the length is needed and unknown (a stream with no max_steps), or *kwargs* holds
    what the schedule does not take.
    """
    # They bring half of transformers' trainer, and peft: runs without a schedule start sooner without them.
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
    from transformers.trainer_utils import SchedulerType

    length = decay_steps or total_steps
    function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    parameters = inspect.signature(function).parameters
    warms_up, decays = "num_warmup_steps" in parameters, "num_training_steps" in parameters
    _check_all_used(
        name, {"warmup_steps": warmup_steps, "warmup_ratio": warmup_ratio} if not warms_up else {}
    )
    _check_all_used(
        name, {"decay_steps": decay_steps} if not decays and warmup_ratio is None else {}
    )
    _check_kwargs(
        name, kwargs or {}, {key: p for key, p in parameters.items() if key not in _FILLED}
    )
    if length is None and (decays or warmup_ratio is not None):
        raise RecipeError(
            "this schedule requires the number of steps, which the data set does not define",
            where="lr_scheduler.name",
            value=name,
            hint="set step_scheduler.max_steps or lr_scheduler.decay_steps, or use the schedule constant",
        )
    warmup = (
        round(warmup_ratio * length)
        if warmup_ratio is not None and length is not None
        else warmup_steps or 0
    )
    try:
        schedule: LRScheduler = get_scheduler(name, optimizer, warmup, length, dict(kwargs or {}))
        for factor in getattr(schedule, "lr_lambdas", ()):
            (
                factor(warmup),
                factor(length or warmup + 1),
            )  # what is wrong shall not show after the warm-up only
    except (TypeError, ValueError, ArithmeticError) as error:
        raise RecipeError(
            f"the schedule {name} cannot be computed with these values",
            where="lr_scheduler.kwargs",
            value=f"{dict(kwargs or {})} ({type(error).__name__}: {error})",
            hint="correct them, or remove them to use the schedule's defaults",
        ) from error
    return schedule


def current_rate(optimizer: Optimizer) -> float:
    """The learning rate of the first parameter group, as it stands for the next step."""
    return float(optimizer.param_groups[0]["lr"])


def follow_schedule(schedule: LambdaLR) -> None:
    """Set the learning rates to what *schedule* says for its present step.

    A loaded state holds the rates of the schedule it was saved under; needed when that was another one.
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
    """Set a fresh *schedule*, and the learning rates of its optimizer, to where they are after *num_steps* steps."""
    if isinstance(schedule, LambdaLR):
        # LambdaLR computes rates from last_epoch alone. step() would warn if the count did not match.
        schedule.last_epoch = num_steps
        schedule._step_count = num_steps + 1
        follow_schedule(schedule)
        return
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch expects a step of the optimizer before each of these
        for _ in range(num_steps):
            schedule.step()


def _check_all_used(name: str, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if value is not None:
            raise RecipeError(
                f"the schedule {name} does not use {key}",
                where=f"lr_scheduler.{key}",
                value=value,
                hint="remove it, or choose another schedule",
            )


def _check_kwargs(
    name: str, given: Mapping[str, Any], taken: Mapping[str, inspect.Parameter]
) -> None:
    unknown = sorted(set(given) - set(taken))
    missing = [key for key, p in taken.items() if p.default is p.empty and key not in given]
    if unknown or missing:
        raise RecipeError(
            f"the schedule {name} requires {', '.join(missing)}"
            if missing
            else f"the schedule {name} does not accept this",
            where="lr_scheduler.kwargs",
            value=", ".join(unknown) or dict(given),
            hint=f"it takes {', '.join(sorted(taken)) or 'nothing besides'}",
        )
