"""``ckpt eval``: run tasks of lm-evaluation-harness on the model of a checkpoint, an export or an adapter."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from automodel_ckpt.base.terminal import print_error
from automodel_ckpt.base.units import measure_text
from automodel_ckpt.cli.common.output import print_document, table
from automodel_ckpt.cli.common.paths import local_model
from automodel_ckpt.cli.entry import ending_on_interrupt
from automodel_ckpt.cli.models.generate import SOURCE_OPTIONS, load_model
from automodel_ckpt.errors import printable

if TYPE_CHECKING:
    from automodel_ckpt.models.measure.harness import TaskMetric

_TASKS = "--tasks"
_FIELDS = ("name", "task", "metric", "value", "stderr")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ArgumentTypeError("there is no name of a task")
    return names


USAGE = f"""
Run tasks of EleutherAI's lm-evaluation-harness on a model (pip install 'automodel_ckpt[eval]'). The data of the
library's tasks are downloaded from the Hugging Face Hub. Task files can contain code, which is executed.

{SOURCE_OPTIONS}
{_TASKS} required NAME,... | tasks or groups of tasks; `lm_eval ls tasks` lists those of the library
--include-path path DIR | a directory with task files of your own
--num-fewshot >=0 N   | examples in each prompt (default: as the task states)
--limit >=1 N         | only the first N samples of each task
--batch-size >=1 =1 N | samples per forward pass (default: 1)
--chat-template       | render prompts as messages of a user with the tokenizer's chat template
"""
TYPES = {_TASKS: _names}


def run(arguments: Namespace) -> int:
    """Run ``ckpt eval``. The metrics are printed on standard output, messages on standard error."""
    local_model(arguments.path)
    with ending_on_interrupt():
        from automodel_ckpt.models.measure.harness import (
            HarnessTasks,
            check_tasks,
            require_harness,
            run_tasks,
        )

        # Before the model is loaded, which takes longer.
        require_harness(_TASKS)
    given = HarnessTasks(
        arguments.tasks,
        arguments.include_path,
        arguments.num_fewshot,
        arguments.limit,
        arguments.batch_size,
        arguments.chat_template,
    )
    print_error("finding the tasks of lm-evaluation-harness")
    index = check_tasks(given, _TASKS)
    loaded = load_model(arguments)
    metrics = run_tasks(loaded.model, loaded.tokenizer, given, index)
    values = [{name: getattr(each, name) for name in _FIELDS} for each in metrics]
    document = {"model": loaded.name, "metrics": values}
    return print_document(arguments, document, map(printable, _table(metrics)))


def _table(metrics: Sequence[TaskMetric]) -> list[str]:
    """One line per metric: task, metric, value, and the standard error where there is one."""
    rows = [("task", "metric", "value")]
    for each in metrics:
        error = "" if each.stderr is None else f" +- {measure_text(each.stderr)}"
        rows.append((each.task, each.metric, f"{measure_text(each.value)}{error}"))
    return table(rows)
