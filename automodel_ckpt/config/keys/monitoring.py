"""The sections ``logging``, ``hangs``, ``profile``, ``generation``, ``evaluation``: what is logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_2,
    FINITE,
    NOT_EMPTY,
    POSITIVE,
    Condition,
    Relation,
    Rule,
    setting,
)

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
KNOWN_TRACKERS = Rule(
    lambda trackers: set(trackers) <= set(TRACKERS), f"a section with {', '.join(TRACKERS)}"
)
OPTIONS = Rule(
    lambda given: all(isinstance(value, dict) for value in given.values()),
    "sections of options, as {}",
)

TRACKER_OPTIONS = {
    "tensorboard": ("log_dir",),
    "mlflow": ("tracking_uri", "experiment", "run_name", "tags", "start_time"),
}
"""The options of the trackers that take no others."""
RECIPE_OPTIONS = {
    **TRACKER_OPTIONS,
    "wandb": (
        "project",
        "entity",
        "name",
        "group",
        "job_type",
        "tags",
        "notes",
        "id",
        "mode",
        "resume",
        "dir",
    ),
    "trackio": ("project", "name", "group", "resume"),
}
"""The options that a recipe file may give to each tracker. Others name hosts, code or files, or send more."""


def has_known_options(trackers: Mapping[str, Any]) -> bool:
    """Whether each tracker has only options that it takes, as far as they are known."""
    return all(
        set(options) <= set(TRACKER_OPTIONS.get(tracker, options))
        for tracker, options in trackers.items()
    )


KNOWN_OPTIONS = Rule(
    has_known_options,
    "sections of options that the trackers have: "
    + "; ".join(f"{name} has {', '.join(options)}" for name, options in TRACKER_OPTIONS.items())
    + "; wandb and trackio have the arguments of their function init",
)


@dataclass
class LoggingConfig:
    """Console output, log files and trackers."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of the messages shown."""
    log_every_seconds: float | None = setting(None, FINITE)
    """Seconds between lines about steps; null: about 25 lines in a run, and one in 10 minutes at least."""
    log_every_steps: int | None = setting(None, AT_LEAST_1)
    """Print a line about every Nth step instead, and send only these steps to the trackers; training.jsonl has all
    steps. null: by time, and trackers get all steps."""
    peak_tflops: float | None = setting(None, POSITIVE)
    """Rate of one device in TFLOP/s that the logged MFU is relative to; null: measured at the start on a GPU, and no
    MFU on a CPU."""
    sample_ids: bool = False
    """Log the sample indices of each global batch to training.jsonl."""
    trackers: dict[str, Any] = field(
        default_factory=dict, metadata={"rules": (KNOWN_TRACKERS, OPTIONS, KNOWN_OPTIONS)}
    )
    """Experiment trackers and their options, such as {tensorboard: {}}; also wandb, mlflow, trackio."""


@dataclass
class HangsConfig:
    """Steps that do not end, and ranks that are slower than others. When a step hangs, the stacks of all ranks are
    written to hangs/ in the run directory, and the rank that the others wait for is reported. Saves and validations do
    not count. The first steps of a run may take long, but no rank may wait in them for another one for two thirds of
    distributed.timeout_minutes; the first steps of a restart are compared with earlier starts."""

    min_seconds: float = setting(300.0, POSITIVE)
    """A step hangs if it takes at least this long, in seconds, and factor times the median of the steps before."""
    factor: float = setting(10.0, POSITIVE)
    """A step hangs if it takes this many times the median of the steps before, and at least min_seconds."""
    restart: bool = True
    """Restart the ranks after a hang, if --max-restarts allows it; false: report it, and wait."""
    straggler_share: float = setting(0.1, POSITIVE)
    """Report a rank if its forward passes take longer than the median of the other ranks by more than this share of it,
    or if they wait for it in each step for more than this share of the step."""
    straggler_steps: int = setting(100, AT_LEAST_1)
    """Compare the ranks every N steps. A rank is reported if it is slow twice in a row."""


RANK_NUMBERS = Rule(
    lambda ranks: bool(ranks) and all(rank >= 0 for rank in ranks), "a list of ranks from 0"
)


@dataclass
class ProfileConfig:
    """A trace of a few steps with torch's profiler. Without this section, nothing is traced."""

    start_step: int = setting(10, AT_LEAST_2)
    """First traced step, counted from the start of this process: the first steps of every start are slower."""
    num_steps: int = setting(3, AT_LEAST_1)
    """Number of traced steps."""
    warmup_steps: int = setting(1, AT_LEAST_1)
    """Steps before start_step that run with the profiler. Their measurements are dropped."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata={"rules": (RANK_NUMBERS,)})
    """Ranks that write a trace each."""
    record_shapes: bool = False
    """Record the shapes of the inputs of operations."""
    with_stack: bool = False
    """Record the lines of source code that call operations; the traced steps are slower."""
    memory: bool = False
    """Record how operations allocate memory."""
    directory: str | None = None
    """Directory of the traces; null: profile/ in the run directory, or in the current one without checkpoints."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("start_step", "warmup_steps"),
            lambda section: section.warmup_steps < section.start_step,
            "warmup_steps must be less than start_step: these steps come before it",
            "increase profile.start_step, or decrease profile.warmup_steps",
        ),
    )


@dataclass
class HarnessConfig:
    """Tasks of lm-evaluation-harness on the model in training (extra `eval`). Metrics are named eval_TASK_METRIC."""

    tasks: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Tasks or groups of tasks; `lm_eval ls tasks` lists the library's tasks. Their data are downloaded."""
    every_steps: int | None = setting(None, AT_LEAST_1)
    """Run the tasks after every N steps, and at the end; null: only at the end."""
    limit: int | None = setting(None, AT_LEAST_1)
    """Use only the first N samples of each task; null: all."""
    num_fewshot: int | None = setting(None, AT_LEAST_0)
    """Examples in each prompt; null: as the task states."""
    include_path: str | None = setting(None, NOT_EMPTY)
    """Directory with task files of your own. They can contain code, so the directory needs --trust."""
    batch_size: int = setting(1, AT_LEAST_1)
    """Samples per forward pass. Each rank computes all samples."""
    chat_template: bool = False
    """Render prompts as messages of a user with the tokenizer's chat template."""


@dataclass
class EvaluationConfig:
    """Benchmarks during training."""

    harness: HarnessConfig | None = None
    """Tasks of lm-evaluation-harness on the model in training; null: none."""


@dataclass
class GenerationConfig:
    """Completions of a few prompts at each validation, written to the log, training.jsonl, plots and trackers."""

    prompts: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Prompts. With a chat template, each is a message of the user."""
    system: str | None = None
    """The system message before each prompt."""
    raw: bool = False
    """Continue the prompts as text, without the chat template."""
    max_new_tokens: int = setting(64, AT_LEAST_1)
    """Maximum tokens of a completion."""
    temperature: float = setting(0.0, FINITE)
    """0: always the most probable token; above 0: sample, with the same random numbers at each validation of a step."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("system",),
            ("raw",),
            lambda section: not section.raw,
            "raw prompts are not messages",
            "remove generation.system or generation.raw",
        ),
    )
