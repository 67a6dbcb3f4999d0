"""The section ``evaluation``: benchmarks that run during training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from automodel_ckpt.config.rules import AT_LEAST_0, AT_LEAST_1, NOT_EMPTY, setting


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


def has_benchmarks(recipe: Any) -> bool:
    """Whether a recipe, or a namespace with its fields, runs benchmarks during training."""
    section = getattr(recipe, "evaluation", None)
    return section is not None and section.harness is not None
