"""The sections ``distributed`` and ``step_scheduler``: how a run is divided into ranks, batches and steps."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_1,
    AT_LEAST_1_OR_AUTO,
    AT_LEAST_2,
    FINITE,
    NOT_EMPTY,
    POSITIVE,
    WAIT,
    Condition,
    Relation,
    Rule,
    Target,
    excludes,
    setting,
)


class MeshSizes(TypedDict):
    """The sizes of the device mesh that a recipe gives. A *dp_size* of None takes all remaining ranks."""

    dp_size: int | None
    dp_replicate_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    ep_size: int


@dataclass
class DistributedConfig:
    """Parallelism: how the work is distributed across ranks."""

    strategy: Literal["auto", "fsdp2", "ddp", "single"] = "auto"
    """Data parallelism: fsdp2 shards the model, ddp replicates it; auto: fsdp2 on several ranks (ddp for a quantized
    base); one rank: single, on a GPU with mixed_precision fsdp2."""
    dp_size: int | None = setting(None, AT_LEAST_1)
    """Data-parallel size; null: the number of ranks divided by the other sizes."""
    dp_replicate_size: int = setting(1, AT_LEAST_1)
    """fsdp2: replicas of the model, each sharded across dp_size / dp_replicate_size ranks (HSDP above 1)."""
    tp_size: int = setting(1, AT_LEAST_1)
    """Tensor-parallel size. Layers are sharded according to the model's tensor-parallel plan."""
    # supplied: arguments that the recipe's class adds, so that they are not reported as missing.
    tp_plan: Target | None = field(default=None, metadata={"supplied": ("model",)})
    """Builder of a custom tensor-parallel plan {module name: style}, called with the model; * matches any layer."""
    sequence_parallel: bool = False
    """With tp_size: shard activations between layers along the sequence (Llama and Qwen architectures)."""
    pp_size: int = setting(1, AT_LEAST_1)
    """Pipeline-parallel size: the number of ranks that compute different layers of the model."""
    pp_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """With pp_size: 1f1b alternates forward and backward passes; gpipe runs all forward passes first."""
    cp_size: int = setting(1, AT_LEAST_1)
    """Context-parallel size: each row is sharded along the sequence, and attention by heads."""
    ep_size: int = setting(1, AT_LEAST_1)
    """Expert-parallel size: the data-parallel ranks that store different experts and exchange tokens (MoE, fsdp2)."""
    backend: str | None = None
    """torch.distributed backend; null: nccl on GPUs, otherwise gloo."""
    timeout_minutes: float = setting(30.0, WAIT)
    """Timeout of collectives, in minutes (0.1 to 1000000)."""
    reshard_after_forward: bool = True
    """fsdp2: free gathered parameters after the forward pass (less memory, more communication)."""
    cpu_offload: bool = False
    """fsdp2 on GPUs: keep parameters, gradients and optimizer state in CPU memory when not in use."""
    defer_gradient_sync: bool = False
    """fsdp2: reduce gradients over the ranks once per step, after the last micro-batch. Less communication, but each
    rank holds the unsharded gradient, and the gathered parameters, between micro-batches."""
    mixed_precision: Literal["auto", "bfloat16", "float16", "none"] | None = "auto"
    """Data type of forward and backward; weights, gradient reduction and optimizer state keep model.dtype. auto:
    bfloat16 on a GPU; none or null: model.dtype."""

    @property
    def mesh_sizes(self) -> MeshSizes:
        """The sizes of the device mesh, as arguments of functions that compute or build it."""
        return {
            "dp_size": self.dp_size,
            "dp_replicate_size": self.dp_replicate_size,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "cp_size": self.cp_size,
            "ep_size": self.ep_size,
        }

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            # Without a loss scaler, updates below 6e-8 of a weight would vanish.
            ("mixed_precision",),
            lambda ranks: ranks.mixed_precision != "float16",
            "float16 needs a loss scaler, which is not supported",
            "set it to bfloat16, or remove it",
        ),
        Relation(
            ("sequence_parallel", "tp_plan", "tp_size"),
            lambda ranks: ranks.tp_size > 1 or not (ranks.sequence_parallel or ranks.tp_plan),
            "sequence_parallel and tp_plan require tensor parallelism, but tp_size is 1",
            "set tp_size above 1, or remove them",
        ),
        excludes(
            "pp_size",
            "sequence_parallel",
            "pp_size and sequence_parallel cannot be combined",
            "remove sequence_parallel; tp_size works with pipeline stages without it",
        ),
        Relation(
            ("pp_schedule", "pp_size"),
            lambda ranks: ranks.pp_size > 1 or ranks.pp_schedule == "1f1b",
            "pp_schedule requires pipeline parallelism, but pp_size is 1",
            "set pp_size above 1, or remove pp_schedule",
        ),
        Relation(
            # The gradient norm is then summed in CPU memory, which nccl cannot reduce.
            ("cpu_offload", "backend"),
            lambda ranks: (
                not ranks.cpu_offload or ranks.backend in (None, "gloo") or "cpu:" in ranks.backend
            ),
            "cpu_offload needs a backend that also reduces CPU tensors",
            "remove backend, or set it to cpu:gloo,cuda:nccl",
        ),
        excludes(
            "ep_size",
            "tp_size",
            "ep_size and tp_size cannot be combined",
            "remove one of them",
        ),
        Relation(
            ("ep_size", "strategy"),
            lambda ranks: ranks.ep_size == 1 or ranks.strategy in ("auto", "fsdp2"),
            "expert parallelism shards the model, which only fsdp2 does",
            "set distributed.strategy to fsdp2 or auto, or remove ep_size",
        ),
        excludes(
            "cp_size",
            "sequence_parallel",
            "cp_size and sequence_parallel cannot be combined: both shard the sequence",
            "remove sequence_parallel",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("reshard_after_forward", "defer_gradient_sync"),
            ("strategy",),
            lambda ranks: ranks.strategy in ("auto", "fsdp2"),
            "only fsdp2 shards parameters, and can reduce gradients after each micro-batch",
            "set distributed.strategy to fsdp2 or auto, or remove the key",
        ),
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
    """Convert ``90``, ``1.5``, ``MM:SS`` or ``HH:MM:SS`` to seconds. Returns None for other text and for 0."""
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
    """What follows a step with a loss or gradient norm that is far above earlier ones, or not finite: the run goes back
    to a checkpoint and leaves out the batches that led to it."""

    rollback: int = setting(1, AT_LEAST_1)
    """Go back to the state of N steps before the spike: load the newest checkpoint before, and repeat the steps up to
    there."""
    skip: int | None = setting(None, AT_LEAST_1)
    """Batches that are then left out, in addition to batches of earlier spikes; null: as many as rollback, so that the
    last one is the batch of the spike."""
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
