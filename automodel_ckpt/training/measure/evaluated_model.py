"""The model in training, as benchmarks and completions use it between two steps, without a trace in the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.measure.harness import Interrupted
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.parallelize import gather_root, reshard
from automodel_ckpt.parallel.ranks.agree import sum_over_ranks
from automodel_ckpt.training.model.trainable import Trainable


class EvaluatedModel:
    """Lends the model in training to what generates text or computes probabilities with it.

    Within :meth:`in_use`, the model is in evaluation mode. Afterwards its mode and the random states are those from
    before.
    """

    def __init__(
        self,
        what: str,
        where: str,
        trainable: Trainable,
        preprocessor: Any,
        layout: RankLayout,
        rng: StatefulRNG,
        stop_is_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """*what* needs the model, because of the section *where*.

        Raises :class:`RecipeError` for a model that computes no logits of tokens, and without a tokenizer.
        """
        self.model: Any = unwrap(trainable.model)
        self.preprocessor = preprocessor
        self.tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
        self.trainable = trainable
        self.layout = layout
        self._rng = rng
        self._stop_is_wanted = stop_is_wanted
        can_generate = getattr(self.model, "can_generate", lambda: hasattr(self.model, "generate"))
        if preprocessor is None or not can_generate():
            raise RecipeError(
                f"{what} need a tokenizer and a model of transformers that generates text",
                where=where,
                value=type(self.model).__name__ if preprocessor is not None else "no tokenizer",
                hint="remove the section",
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
        (wanted,) = sum_over_ranks(self.layout.gloo_group, self._stop_is_wanted())
        if wanted:
            raise Interrupted
