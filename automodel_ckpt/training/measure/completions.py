"""Completions of a few prompts at each validation (section ``generation``), to read what the model has learned."""

from __future__ import annotations

from typing import Any

import torch

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.config.keys.evaluation import GenerationConfig
from automodel_ckpt.models.measure.generation import (
    Sampling,
    generate,
    has_chat_template,
    inputs_of,
)
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.training.measure.evaluated_model import EvaluatedModel
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.values.records import PromptCompletion


class Completions:
    """Generates the completions of a recipe's prompts with the model in training, and leaves no trace in training.

    All ranks generate the same tokens, because a model that is sharded over them computes each one together.
    """

    def __init__(
        self,
        settings: GenerationConfig,
        trainable: Trainable,
        preprocessor: Any,
        layout: RankLayout,
        rng: StatefulRNG,
    ) -> None:
        """Raises :class:`RecipeError` for a model that cannot generate text, and without a tokenizer."""
        self._settings = settings
        self._evaluated = EvaluatedModel(
            "completions", "generation", trainable, preprocessor, layout, rng
        )
        self._sampling = Sampling(settings.max_new_tokens, settings.temperature)

    def at(self, step: int) -> list[PromptCompletion]:
        """Generate a completion of each prompt after *step*. A collective; the same on all ranks."""
        with self._evaluated.in_use():
            # Other tokens on one rank would be another number of forward passes, each of which is a collective.
            torch.manual_seed(step)
            return [self._complete(prompt) for prompt in self._settings.prompts]

    def _complete(self, prompt: str) -> PromptCompletion:
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
        return PromptCompletion(prompt, completion.text, completion.num_tokens)
