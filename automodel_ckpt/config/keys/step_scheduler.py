"""The section ``step_scheduler``: batch sizes, training length, and when to validate and save."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_1,
    AT_LEAST_1_OR_AUTO,
    AT_LEAST_2,
    FINITE,
    NOT_EMPTY,
    POSITIVE,
    Condition,
    Relation,
    Rule,
    setting,
)

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Signals that can request a stop. Python, torch or the operating system use the others."""
KNOWN_SIGNALS = Rule(
    lambda names: set(names) <= set(STOP_SIGNALS), f"a list out of {', '.join(STOP_SIGNALS)}"
)
ABOVE_1 = Rule(lambda factor: 1 < factor < math.inf, "more than 1")
DURATION = Rule(
    lambda text: parse_duration(text) is not None, "a number of seconds above 0, or HH:MM:SS"
)


def parse_duration(text: str) -> float | None:
    """Convert ``90``, ``1.5``, ``MM:SS`` or ``HH:MM:SS`` to seconds; None if the text is not a positive duration."""
    # ASCII: \d and float() accept the digits of every alphabet, other readers do not.
    if not re.fullmatch(r"(\d+:)?\d+:[0-5]\d|\d+(\.\d*)?([eE][+-]?\d+)?", text, re.ASCII):
        return None
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds if 0 < seconds < math.inf else None


@dataclass
class EarlyStoppingConfig:
    """End the run when a metric of the validations does not improve anymore."""

    metric: str | None = setting(None, NOT_EMPTY)
    """Metric of validations, such as val_loss or val_accuracy_NAME; null: checkpoint.best_metric_key."""
    patience: int = setting(3, AT_LEAST_1)
    """Consecutive validations without an improvement after which the run ends."""
    min_delta: float = setting(0.0, FINITE)
    """A value has to be better than the best one by more than this to be an improvement."""


@dataclass
class OnSpikeConfig:
    """What follows a step whose loss or gradient norm is far above those before, or not finite: the run goes back to a
    checkpoint and leaves out the batches that led to it."""

    rollback: int = setting(1, AT_LEAST_1)
    """Go back to the state of N steps before the spike: load the newest checkpoint before, and repeat the steps up to
    there."""
    skip: int | None = setting(None, AT_LEAST_1)
    """Batches that are then left out, in addition to those of earlier spikes; null: as many as rollback, so that the
    last one is that of the spike."""
    loss_factor: float | None = setting(2.0, ABOVE_1)
    """A loss above this times the median of the window is a spike; null: no limit, for losses that approach or cross
    zero (DPO's robust and hinge)."""
    grad_norm_factor: float | None = setting(10.0, ABOVE_1)
    """A gradient norm above this times the median of the window is a spike; null: no limit."""
    window: int = setting(50, AT_LEAST_2)
    """Number of steps before, of which the median is taken. There is no limit until the first window is full."""
    max_rollbacks: int = setting(10, AT_LEAST_1)
    """End the run with an error at the next spike after this many rollbacks."""


@dataclass
class StepSchedulerConfig:
    """Batch sizes, training length, and when to validate and save."""

    global_batch_size: int = setting(8, AT_LEAST_1)
    """Samples per optimizer step, across all ranks. It determines the gradient accumulation steps."""
    local_batch_size: int = setting(1, AT_LEAST_1)
    """Samples per rank and forward pass (micro-batch)."""
    num_epochs: int | None = setting(None, AT_LEAST_1)
    """Maximum number of epochs; null: as many as max_steps needs, or 1 if max_steps is null too."""
    max_steps: int | None = setting(None, AT_LEAST_1)
    """Maximum number of optimizer steps."""
    max_time: str | None = setting(None, DURATION)
    """Maximum training time since this start, in seconds or HH:MM:SS."""
    ckpt_every_steps: int | Literal["auto"] | None = setting(None, AT_LEAST_1_OR_AUTO)
    """Save every N steps; auto: the Young/Daly interval, computed from measured save costs."""
    mtbf_hours: float = setting(24.0, POSITIVE)
    """For ckpt_every_steps auto: mean time between failures of the whole job, in hours."""
    ckpt_every_epochs: int | None = setting(1, AT_LEAST_1)
    """Save every N epochs."""
    ckpt_every_minutes: float | None = setting(None, POSITIVE)
    """Save when N minutes have passed since the last save."""
    ckpt_on_best: bool = False
    """Save when a validation improves checkpoint.best_metric_key."""
    val_every_steps: int | None = setting(None, AT_LEAST_1)
    """Validate every N steps, in addition to the validation at each checkpoint."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when a metric of the validations does not improve anymore."""
    stop_after_nonfinite_steps: int | None = setting(None, AT_LEAST_1)
    """Stop with an error after N consecutive steps with a loss or gradient norm that is not finite; null: only if none
    of the first 10 steps of a new run has a finite gradient norm. A step without one changes no weight."""
    on_spike: OnSpikeConfig | None = None
    """Go back and leave out batches when the loss or the gradient norm spikes; null: continue."""
    stop_signals: list[str] = field(
        default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGHUP"],
        metadata={"rules": (KNOWN_SIGNALS,)},
    )
    """Save and stop when any rank or the launcher receives one of these signals. SIGINT (Ctrl-C) is always handled.
    SIGHUP is sent when a terminal closes; nohup ignores it. SIGUSR2 saves and continues unless it is listed."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("global_batch_size", "local_batch_size"),
            lambda steps: steps.global_batch_size % steps.local_batch_size == 0,
            "global_batch_size must be a multiple of local_batch_size",
            "set global_batch_size = local_batch_size x data-parallel ranks x gradient accumulation steps",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("mtbf_hours",),
            ("ckpt_every_steps",),
            lambda steps: steps.ckpt_every_steps == "auto",
            "it is only used with ckpt_every_steps auto",
            "set step_scheduler.ckpt_every_steps to auto, or remove the key",
        ),
    )

    @property
    def stop_signal_numbers(self) -> tuple[signal.Signals, ...]:
        """``stop_signals`` and SIGINT."""
        return (*(signal.Signals[name] for name in dict.fromkeys(self.stop_signals)), signal.SIGINT)

    @property
    def effective_num_epochs(self) -> int | None:
        """``num_epochs``; if that is null, 1, or None (no limit) if ``max_steps`` is set."""
        # max_time does not count: it limits one start, so a requeued run would never end.
        if self.num_epochs is None and self.max_steps is None:
            return 1
        return self.num_epochs

    @property
    def max_time_seconds(self) -> float | None:
        """``max_time`` in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)
