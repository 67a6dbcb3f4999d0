"""Tasks of lm-evaluation-harness on the model in training (section ``evaluation.harness``)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.module_tensors import unwrap
from automodel_ckpt.config.sections.evaluation import HarnessConfig
from automodel_ckpt.distributed.agree import broadcast_object, raise_on_all_ranks, sum_over_ranks
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.distributed.parallelize import gather_root, reshard
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.harness import (
    HarnessTasks,
    Interrupted,
    TaskMetric,
    check_data,
    check_tasks,
    require_harness,
    run_tasks,
)
from automodel_ckpt.recipes.trainable import Trainable
from automodel_ckpt.training.rng import StatefulRNG

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


class Benchmarks:
    """Runs the tasks of a recipe with the model in training, and leaves no trace in training.

    The model is in evaluation mode meanwhile, and random states are restored. All ranks compute the same samples,
    because a model that is sharded over them computes each one together.
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
        """*index* has the tasks (:func:`~automodel_ckpt.models.harness.check_tasks`).

        Raises :class:`RecipeError` for a model that computes no logits of tokens, and without a tokenizer.
        """
        self._tasks = tasks_of(settings)
        self._index = index
        self._trainable = trainable
        self._model: Any = unwrap(trainable.model)
        self._tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
        self._layout = layout
        self._rng = rng
        self._stop_is_wanted = stop_is_wanted
        can_generate = getattr(
            self._model, "can_generate", lambda: hasattr(self._model, "generate")
        )
        if preprocessor is None or not can_generate():
            raise RecipeError(
                "the tasks need a tokenizer and a model of transformers that generates text",
                where=SECTION,
                value=type(self._model).__name__ if preprocessor is not None else "no tokenizer",
                hint="remove the section",
            )

    def run(self) -> Sequence[TaskMetric] | None:
        """Run the tasks; returns their metrics, or None if a stop was requested meanwhile. A collective; the same on
        all ranks."""
        was_training = self._trainable.model.training
        try:
            # A compiled layer would be compiled again for each new length, also for later steps of training.
            with self._rng.preserved(), torch.compiler.set_stance("force_eager"):
                gather_root(self._model)
                found = run_tasks(
                    self._model,
                    # The library changes the padding of its tokenizer.
                    copy.deepcopy(self._tokenizer),
                    self._tasks,
                    self._index,
                    autocast=self._autocast(),
                    before_forward=self._check_for_stop,
                )
        except Interrupted:
            return None
        finally:
            self._trainable.model.train(was_training)
            # With FSDP2, a forward pass without a backward pass leaves parameters gathered.
            reshard(self._trainable.model)
        # Only rank 0 surely has them.
        return broadcast_object(self._layout.gloo_group, found)

    def _autocast(self) -> torch.dtype | None:
        """The dtype of autocast in forward passes; None if it is not enabled."""
        device_type = self._layout.device.type
        with self._trainable.compute():
            if torch.is_autocast_enabled(device_type):
                return torch.get_autocast_dtype(device_type)
        return None

    def _check_for_stop(self) -> None:
        """Raise :class:`Interrupted` on all ranks if any rank received a stop request. A collective."""
        (wanted,) = sum_over_ranks(self._layout.gloo_group, self._stop_is_wanted())
        if wanted:
            raise Interrupted


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
