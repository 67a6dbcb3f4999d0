"""Tasks of EleutherAI's lm-evaluation-harness (lm_eval 0.4) on a transformers model in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from automodel_ckpt.base.bounded_templates import bound_chat_templates, template_errors
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import did_you_mean, naming_files
from automodel_ckpt.models.inspect.repository import quiet

EXTRA = "automodel_ckpt[eval]"
_LIBRARY_LOGGER = "lm_eval"
"""It warns about every model in memory."""
_BOOTSTRAP_ITERATIONS = 100
"""For the standard errors of metrics that have no formula. The library's default of 100,000 takes minutes."""


@dataclass(frozen=True)
class HarnessTasks:
    """The tasks to run: names of *tasks* or groups, of the library or of the task files below *include_path*.

    *limit* is the number of samples of each task, and *num_fewshot* the examples in a prompt; None: as the task states.
    With *chat_template*, prompts are messages of a user.
    """

    tasks: Sequence[str]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 1
    chat_template: bool = False


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task. *stderr* is its standard error. None when the task has none."""

    task: str
    metric: str
    value: float
    stderr: float | None

    @property
    def name(self) -> str:
        """The name in logs, such as ``eval_hellaswag_acc_norm``."""
        return f"eval_{self.task}_{self.metric}"


class Interrupted(BaseException):
    """The tasks were interrupted between two forward passes. Not an Exception, which the library may catch."""


def require_harness(where: str) -> None:
    """Raise :class:`RecipeError` if the library is not installed. It is not imported."""
    if find_spec("lm_eval") is None:
        raise RecipeError(
            "lm-evaluation-harness is not installed",
            where=where,
            value="",
            hint=f"pip install '{EXTRA}'",
        )


def check_tasks(given: HarnessTasks, where: str) -> Any:
    """Find the tasks, and return the library's index of them; no data is read.

    Raises :class:`RecipeError` for a name that there is not, for the key or option *where*.
    """
    from lm_eval.tasks import TaskManager

    if given.include_path is not None and not given.include_path.is_dir():
        raise RecipeError(
            "there is no directory of task files (YAML)",
            where=where,
            value=given.include_path,
            hint="",
        )
    include = None if given.include_path is None else str(given.include_path)
    with quiet(_LIBRARY_LOGGER), _reporting(where, str(include)):
        index = TaskManager(include_path=include, include_defaults=False)
        # The library has thousands of task files, which take many seconds to read.
        if not set(given.tasks) <= set(index.all_tasks):
            index = TaskManager(include_path=include)
    known = set(index.all_tasks)
    for name in given.tasks:
        if name not in known:
            raise RecipeError(
                "there is no such task",
                where=where,
                value=name,
                hint=f"{did_you_mean(name, known)} `lm_eval ls tasks` lists all tasks of the library",
            )
    return index


def check_data(given: HarnessTasks, index: Any, where: str) -> None:
    """Read the data of the tasks once, so that a later run finds them.

    Raises :class:`RecipeError` for data that cannot be read, for the key or option *where*.
    """
    from lm_eval.tasks import get_task_dict

    with quiet(_LIBRARY_LOGGER), _reporting(where, ", ".join(given.tasks)):
        get_task_dict(list(given.tasks), index)


def run_tasks(
    model: Any,
    tokenizer: Any,
    given: HarnessTasks,
    index: Any,
    *,
    autocast: Any = None,
    before_forward: Callable[[], None] = lambda: None,
) -> list[TaskMetric]:
    """Run tasks of *index* on *model*, in evaluation mode, and return their metrics in a fixed order; empty in a
    process with a LOCAL_RANK other than 0.

    It seeds the random generators of Python, NumPy and torch, and sets the padding of *tokenizer*. *autocast* is the
    torch dtype of autocast; None: no autocast. *before_forward* is called before each forward pass or generated text,
    and may raise :class:`Interrupted`. Raises :class:`RecipeError` if the data of a task cannot be read.
    """
    from lm_eval.evaluator import simple_evaluate

    with quiet(_LIBRARY_LOGGER), _reporting("lm-evaluation-harness", ", ".join(given.tasks)):
        adapter = _adapter(before_forward)(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=given.batch_size,
            # Otherwise, the library disables the autocast of its caller.
            mixed_precision_dtype=autocast,
        )
        results = simple_evaluate(
            model=adapter,
            tasks=list(given.tasks),
            num_fewshot=given.num_fewshot,
            limit=given.limit,
            task_manager=index,
            apply_chat_template=given.chat_template,
            log_samples=False,
            bootstrap_iters=_BOOTSTRAP_ITERATIONS,
        )
    # The library returns nothing where LOCAL_RANK is not 0.
    return [] if results is None else list(metrics_of(results["results"]))


def _adapter(before_forward: Callable[[], None]) -> Any:
    """The library's class of transformers models, which calls *before_forward* and limits chat templates."""
    from lm_eval.models.huggingface import HFLM

    class Adapter(HFLM):  # type: ignore[misc]
        def _model_call(self, *arguments: Any, **options: Any) -> Any:
            before_forward()
            return super()._model_call(*arguments, **options)

        def _model_generate(self, *arguments: Any, **options: Any) -> Any:
            before_forward()
            return super()._model_generate(*arguments, **options)

        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            bound_chat_templates()
            with template_errors("the tokenizer's chat template"):
                return super().apply_chat_template(*arguments, **options)

    return Adapter


def metrics_of(results: Mapping[str, Values]) -> Iterator[TaskMetric]:
    """Yield the metrics in the ``results`` of the library. Their keys are ``METRIC,FILTER``.

    The filter ``none`` is left out of names, others are appended.
    """
    for task, found in sorted(results.items()):
        for key, value in found.items():
            metric, separator, filtered = key.partition(",")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not separator or not is_number or metric.endswith("_stderr"):
                continue
            stderr = found.get(f"{metric}_stderr,{filtered}")
            name = metric if filtered == "none" else f"{metric}_{filtered}"
            # The library writes N/A where there is none, and NaN for a single sample.
            error = None
            if isinstance(stderr, (int, float)) and math.isfinite(stderr):
                error = float(stderr)
            yield TaskMetric(task, name, float(value), error)


def _reporting(where: str, tasks: str) -> AbstractContextManager[None]:
    """Raise :class:`RecipeError` for any failure of the library, of a task file, or of the data of a task."""
    hint = "check the task files; the data of the library's tasks is downloaded from the Hugging Face Hub"
    return naming_files(f"lm-evaluation-harness failed ({tasks})", where, hint=hint)
