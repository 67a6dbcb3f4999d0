"""The sections ``evaluation`` and ``generation``: benchmarks and completions during training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE,
    NOT_EMPTY,
    Condition,
    setting,
)


@dataclass
class HarnessConfig:
    """Tasks of lm-evaluation-harness on the model in training (extra `eval`). Metrics are named eval_TASK_METRIC."""

    tasks: list[str] = field(kw_only=True, metadata={"rules": (NOT_EMPTY,)})
    """Tasks or groups of tasks; `lm_eval ls tasks` lists those of the library, whose data are downloaded."""
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


def benchmarks_of(recipe: Any) -> list[HarnessConfig]:
    """List the sections of the benchmarks that a recipe, or a namespace with its fields, runs during training."""
    section = getattr(recipe, "evaluation", None)
    if section is None or section.harness is None:
        return []
    return [section.harness]


def has_benchmarks(recipe: Any) -> bool:
    """Whether a recipe, or a namespace with its fields, runs benchmarks during training.

    A section that is not valid counts: nothing else should be reported because of it.
    """
    section = getattr(recipe, "evaluation", None)
    is_invalid = section is not None and not isinstance(section, EvaluationConfig)
    return is_invalid or bool(benchmarks_of(recipe))
