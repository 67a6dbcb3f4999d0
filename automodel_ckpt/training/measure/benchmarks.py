"""Tasks of lm-evaluation-harness on the model in training (section ``evaluation.harness``)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.config.keys.evaluation import HarnessConfig
from automodel_ckpt.models.measure.harness import (
    HarnessTasks,
    Interrupted,
    TaskMetric,
    check_data,
    check_tasks,
    require_harness,
    run_tasks,
)
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.agree import broadcast_object, raise_on_all_ranks
from automodel_ckpt.training.measure.evaluated_model import EvaluatedModel
from automodel_ckpt.training.model.trainable import Trainable

log = logging.getLogger("automodel_ckpt")

SECTION = "evaluation.harness"


def find_tasks(section: HarnessConfig, group: ProcessGroup | None) -> Any:
    """Find the tasks of *section* and read their data; returns the index of tasks. A collective of *group*.

    Raises :class:`RecipeError` if lm-evaluation-harness is not installed, or has no such tasks.
    """
    require_harness(SECTION)
    tasks = tasks_of(section)
    log.info("finding the tasks of lm-evaluation-harness: %s", ", ".join(tasks.tasks))
    with raise_on_all_ranks(group):
        index = check_tasks(tasks, SECTION)
        check_data(tasks, index, SECTION)
    return index


class HarnessBenchmark:
    """Runs the tasks of a recipe with the model in training, and leaves no trace in training.

    All ranks compute the same samples, because a model that is sharded over them computes each one together.
    """

    def __init__(
        self,
        settings: HarnessConfig,
        index: Any,
        trainable: Trainable,
        preprocessor: Any,
        layout: RankLayout,
        rng: StatefulRNG,
        stop_is_wanted: Callable[[], bool],
    ) -> None:
        """*index* has the tasks (:func:`~automodel_ckpt.models.measure.harness.check_tasks`).

        Raises :class:`RecipeError` for a model that computes no logits of tokens, and without a tokenizer.
        """
        self.every_steps = settings.every_steps
        self._tasks = tasks_of(settings)
        self._index = index
        self._evaluated = EvaluatedModel(
            "the tasks", SECTION, trainable, preprocessor, layout, rng, stop_is_wanted
        )

    def run(self) -> Sequence[TaskMetric] | None:
        """Run the tasks; returns their metrics, or None if a stop was requested meanwhile. A collective; the same on
        all ranks."""
        evaluated = self._evaluated
        try:
            with evaluated.in_use():
                found = run_tasks(
                    evaluated.model,
                    # The library changes the padding of its tokenizer.
                    copy.deepcopy(evaluated.tokenizer),
                    self._tasks,
                    self._index,
                    autocast=self._autocast(),
                    before_forward=evaluated.check_for_stop,
                )
        except Interrupted:
            return None
        # Only rank 0 surely has them.
        return broadcast_object(evaluated.layout.gloo_group, found)

    def _autocast(self) -> torch.dtype | None:
        """The dtype of autocast in forward passes; None if it is not enabled."""
        device_type = self._evaluated.layout.device.type
        with self._evaluated.trainable.compute():
            if torch.is_autocast_enabled(device_type):
                return torch.get_autocast_dtype(device_type)
        return None


def tasks_of(settings: HarnessConfig) -> HarnessTasks:
    """The tasks of the section ``evaluation.harness``."""
    include = settings.include_path
    return HarnessTasks(
        settings.tasks,
        None if include is None else Path(include).expanduser(),
        settings.num_fewshot,
        settings.limit,
        settings.batch_size,
        settings.chat_template,
    )
