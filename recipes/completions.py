"""Completions of a few prompts at each validation (section ``generation``), to read what the model has learned."""

from __future__ import annotations

from typing import Any

import torch

from automodel_ckpt.checkpoint.module_tensors import unwrap
from automodel_ckpt.config.sections.evaluation import GenerationConfig
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.distributed.parallelize import gather_root, reshard
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.generation import Sampling, generate, has_chat_template, inputs_of
from automodel_ckpt.recipes.records import PromptCompletion
from automodel_ckpt.recipes.trainable import Trainable
from automodel_ckpt.training.rng import StatefulRNG


class Completions:
    """Generates the completions of a recipe's prompts with the model in training, and leaves no trace in training.

    The model is in evaluation mode meanwhile, and random states are restored. All ranks generate the same tokens,
    because a model that is sharded over them computes each one together.
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
        self._trainable = trainable
        self._model: Any = unwrap(trainable.model)
        self._preprocessor = preprocessor
        self._layout = layout
        self._rng = rng
        can_generate = getattr(
            self._model, "can_generate", lambda: hasattr(self._model, "generate")
        )
        if preprocessor is None or not can_generate():
            raise RecipeError(
                "completions need a tokenizer and a model of transformers that generates text",
                where="generation",
                value=type(self._model).__name__ if preprocessor is not None else "no tokenizer",
                hint="remove the section",
            )
        self._sampling = Sampling(settings.max_new_tokens, settings.temperature)

    def at(self, step: int) -> list[PromptCompletion]:
        """Generate a completion of each prompt after *step*. A collective; the same on all ranks."""
        was_training = self._trainable.model.training
        self._trainable.model.eval()
        completions = []
        try:
            # A compiled layer would be compiled again for each new length, also for later steps of training.
            with self._rng.preserved(), torch.compiler.set_stance("force_eager"):
                # Other tokens on one rank would be another number of forward passes, each of which is a collective.
                torch.manual_seed(step)
                gather_root(self._model)
                for prompt in self._settings.prompts:
                    completions.append(self._complete(prompt))
        finally:
            self._trainable.model.train(was_training)
            # With FSDP2, a forward pass without a backward pass leaves parameters gathered.
            reshard(self._trainable.model)
        return completions

    def _complete(self, prompt: str) -> PromptCompletion:
        given: Any = prompt
        if has_chat_template(self._preprocessor) and not self._settings.raw:
            given = [{"role": "user", "content": prompt}]
            if self._settings.system:
                given.insert(0, {"role": "system", "content": self._settings.system})
        inputs = inputs_of(self._preprocessor, given, self._layout.device)
        with self._trainable.compute():
            completion = generate(
                self._model,
                self._preprocessor,
                inputs,
                self._sampling,
                synced=self._layout.world_size > 1,
            )
        return PromptCompletion(prompt, completion.text, completion.num_tokens)
