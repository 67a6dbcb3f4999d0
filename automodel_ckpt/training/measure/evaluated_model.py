"""The model in training, as benchmarks and completions use it between two steps, without a trace in the training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.keys.monitoring import GenerationConfig, HarnessConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.measure.generation import (
    Sampling,
    generate,
    has_chat_template,
    inputs_of,
)
from automodel_ckpt.models.measure.harness import (
    HarnessTasks,
    Interrupted,
    TaskMetric,
    check_data,
    check_tasks,
    require_harness,
    run_tasks,
)
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.parallelize import gather_root, reshard
from automodel_ckpt.parallel.ranks.agree import broadcast_object, raise_on_all_ranks, sum_over_ranks
from automodel_ckpt.training.model.sections import text_tokenizer
from automodel_ckpt.training.model.trainable import Trainable

log = logging.getLogger("automodel_ckpt")


class EvaluatedModel:
    """Lends the model in training to what generates text or computes probabilities with it.

    Within :meth:`in_use`, the model is in evaluation mode. Afterwards its mode and the random states are those from
    before.
    """

    def __init__(self, what: str, where: str, recipe: Any) -> None:
        """*what* needs the model of *recipe*, because of the section *where*.

        Raises :class:`RecipeError` for a model that computes no logits of tokens, and without a tokenizer.
        """
        self.trainable: Trainable = recipe.trainable
        self.model: Any = unwrap(self.trainable.model)
        self.preprocessor = preprocessor = recipe.preprocessor
        self.tokenizer = text_tokenizer(preprocessor)
        self.layout: RankLayout = recipe.layout
        self._rng: StatefulRNG = recipe.rng
        self._recipe = recipe
        can_generate = getattr(self.model, "can_generate", lambda: hasattr(self.model, "generate"))
        if preprocessor is None or not can_generate():
            raise RecipeError(
                f"{what} need a tokenizer and a model of transformers that generates text",
                where=where,
                value=type(self.model).__name__ if preprocessor is not None else "no tokenizer",
                hint="remove the key",
            )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the context, the model can be called. All ranks enter it, and call the model equally often."""
        whole = self.trainable.model
        was_training = whole.training
        whole.eval()
        try:
            # A compiled layer would be compiled again for each new length, also for later steps of training.
            with self._rng.preserved(), torch.compiler.set_stance("force_eager"):
                gather_root(self.model)
                yield
        finally:
            whole.train(was_training)
            # With FSDP2, a forward pass without a backward pass leaves parameters gathered.
            reshard(whole)

    def check_for_stop(self) -> None:
        """Raise :class:`Interrupted` on all ranks if any rank received a stop request. A collective."""
        (wanted,) = sum_over_ranks(self.layout.gloo_group, self._recipe.stop_request.wanted)
        if wanted:
            raise Interrupted


class Completions:
    """Generates the completions of a recipe's prompts with the model in training, and leaves no trace in training.

    All ranks generate the same tokens, because a model that is sharded over them computes each one together.
    """

    def __init__(self, settings: GenerationConfig, recipe: Any) -> None:
        """Raises :class:`RecipeError` if the model of *recipe* cannot generate text, and without a tokenizer."""
        self._settings = settings
        self._evaluated = EvaluatedModel("completions", "generation", recipe)
        self._sampling = Sampling(settings.max_new_tokens, settings.temperature)

    def at(self, step: int) -> list[ValueDict]:
        """Generate a completion of each prompt after *step*: ``prompt``, ``text`` and the number of its ``tokens``.

        A collective. The same on all ranks.
        """
        with self._evaluated.in_use():
            # Other tokens on one rank would be another number of forward passes, each of which is a collective.
            torch.manual_seed(step)
            return [self._complete(prompt) for prompt in self._settings.prompts]

    def _complete(self, prompt: str) -> ValueDict:
        given: Any = prompt
        evaluated = self._evaluated
        if has_chat_template(evaluated.preprocessor) and not self._settings.raw:
            given = [{"role": "user", "content": prompt}]
            if self._settings.system:
                given.insert(0, {"role": "system", "content": self._settings.system})
        inputs = inputs_of(evaluated.preprocessor, given, evaluated.layout.device)
        with evaluated.trainable.compute():
            completion = generate(
                evaluated.model,
                evaluated.preprocessor,
                inputs,
                self._sampling,
                synced=evaluated.layout.world_size > 1,
            )
        return {"prompt": prompt, "text": completion.text, "tokens": completion.num_tokens}


SECTION = "evaluation.harness"


def find_tasks(section: HarnessConfig, group: ProcessGroup | None) -> Any:
    """Find the tasks of *section* and read their data. Returns the index of tasks. A collective of *group*.

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

    def __init__(self, settings: HarnessConfig, recipe: Any) -> None:
        """*recipe* has the index of tasks (:func:`find_tasks`).

        Raises :class:`RecipeError` for a model that computes no logits of tokens, and without a tokenizer.
        """
        self._tasks = tasks_of(settings)
        self._index = recipe.task_index
        self._evaluated = EvaluatedModel("the tasks", SECTION, recipe)

    def run(self) -> Sequence[TaskMetric] | None:
        """Run the tasks and return their metrics. A collective. The result is the same on all ranks.

        Returns None when a stop was requested meanwhile.
        """
        evaluated, autocast = self._evaluated, None
        device_type = evaluated.layout.device.type
        with evaluated.trainable.compute():
            if torch.is_autocast_enabled(device_type):
                autocast = torch.get_autocast_dtype(device_type)
        try:
            with evaluated.in_use():
                found = run_tasks(
                    evaluated.model,
                    # The library changes the padding of its tokenizer.
                    copy.deepcopy(evaluated.tokenizer),
                    self._tasks,
                    self._index,
                    autocast=autocast,
                    before_forward=evaluated.check_for_stop,
                )
        except Interrupted:
            return None
        # Only rank 0 surely has them.
        return broadcast_object(evaluated.layout.gloo_group, found)


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
