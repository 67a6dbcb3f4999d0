"""Errors for what torch raises while it computes a batch: they name the cause, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.models.inspect.vocabulary import check_token_ids, num_embeddings
from automodel_ckpt.optim.build import check_sharding_support
from automodel_ckpt.training.values.pending_steps import PendingSteps
from automodel_ckpt.training.watch.out_of_memory import Situation, reporting_out_of_memory


class BatchErrors:
    """Explains failures of the model and the optimizer of a run, also those of steps that are not logged yet."""

    def __init__(self, situation: Situation, pending: PendingSteps) -> None:
        """*situation* has the model and the optimizer."""
        self._situation = situation
        self._pending = pending

    @contextmanager
    def explained(self, doing: str, batch: GlobalBatch) -> Iterator[None]:
        """Within the context, *batch* is computed. Raises :class:`RecipeError` for a failure whose cause is known.

        *doing* states when, such as ``in the validation of step 7``.
        """
        try:
            with reporting_out_of_memory(doing, self._situation, batch.micro_batches):
                yield
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise

    def explain(self, error: Exception, batch: GlobalBatch) -> None:
        """Raise :class:`RecipeError` if *batch* has tokens that the model does not have, if the optimizer does not
        support sharded parameters, or if the model does not support its tensor parallel plan.

        torch reports only that an index is out of range, on a GPU not even that. Checking after the failure costs
        nothing in other steps.
        """
        situation = self._situation
        assert situation.model is not None and situation.optimizer is not None
        check_sharding_support(situation.optimizer, error)
        from automodel_ckpt.parallel.tensor_plan import check_plan_support

        check_plan_support(error, situation.layout.sizes.tp)
        num_rows = num_embeddings(unwrap(situation.model))
        # A GPU reports the failure of a step while the host queues the next one.
        for each in [*self._pending.batches, batch]:
            where = f"the global batch of samples {each.sample_ids[:16]}"
            check_token_ids(each.micro_batches, num_rows, where)
