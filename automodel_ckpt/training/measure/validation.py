"""The losses and metrics of the validation sets, over all batches and ranks, and how the log describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.parallel.ranks.agree import sum_over_ranks
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.measure.evaluation import EvaluationTotals, sum_by_name
from automodel_ckpt.training.measure.validation_metrics import LOSS, metric_name
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.readback import Number
from automodel_ckpt.training.values.records import Validation
from automodel_ckpt.training.watch.batch_errors import BatchErrors

Batches = Callable[[], Iterator[GlobalBatch]]
"""Reads a validation set from its start."""
ReadBatches = Callable[[Iterable[GlobalBatch]], Iterator[GlobalBatch | None]]
"""Yields the batches of a set, then None if this rank receives a stop request while it waits for one."""
_NO_BATCH = GlobalBatch(0, 0, 0, [], [], last_of_epoch=True)


class ValidationSets:
    """Computes the loss and the metrics of each validation set of a run.

    It leaves no trace in the training: no gradients, and random states are restored. Every method is called on all
    ranks.
    """

    def __init__(
        self,
        sets: Mapping[str | None, Batches],
        objective: Objective,
        rng: StatefulRNG,
        stop_request: StopRequest,
        *,
        measures: Sequence[str],
        read: ReadBatches,
        errors: BatchErrors,
        runs_ahead: bool,
    ) -> None:
        """*sets* are by name; the loss of the first one is ``val_loss``, and the name of ``validation_dataset`` is
        None. *runs_ahead*: the host does not wait for the loss of a batch before it reads the next one."""
        self._sets = sets
        self._objective = objective
        self._trainable = objective.trainable
        self._layout = objective.layout
        self._rng = rng
        self._stop_request = stop_request
        self._measures = measures
        self._read = read
        self._errors = errors
        self._runs_ahead = runs_ahead

    def measure(self, step: int) -> Validation | None:
        """Compute the mean loss over each set after *step*; None if a stop was requested meanwhile."""
        model = self._trainable.model
        totals: dict[str | None, EvaluationTotals] = {}
        if self._trainable.fake_quantization is not None:
            # A run that has just been resumed has made no step.
            self._trainable.fake_quantization.start(max(1, step))
        model.eval()
        try:
            with torch.no_grad(), self._rng.preserved():
                for name, batches in self._sets.items():
                    found = self._totals_of(batches(), step)
                    if found is None:
                        return None
                    totals[name] = found
        finally:
            model.train()
            # With FSDP2, a forward pass without a backward pass leaves parameters gathered.
            reshard(model)
        assert totals, "without validation data, no validation is due"
        losses = {}
        for name, each in totals.items():
            if name is not None:
                losses[name] = each.mean_loss
        main_name, main = next(iter(totals.items()))
        further = self._further_metrics(main_name, totals)
        return Validation(main.mean_loss, main.num_label_tokens, main.count, losses, further)

    def _totals_of(self, batches: Iterable[GlobalBatch], step: int) -> EvaluationTotals | None:
        """The totals of one set over all ranks; None if a stop was requested."""
        with self._objective.evaluating() as measured:
            totals = self._sums_of(batches, step)
        if totals is None:
            return None
        # Context parallel ranks count different labels, as they sum the loss of different ones.
        here = measured.read() if self._layout.reports_loss else {}
        loss, count, num_labels = totals
        sums = sum_by_name(self._layout.gloo_group, here)
        return EvaluationTotals(loss, int(count), int(num_labels), sums)

    def _sums_of(
        self, batches: Iterable[GlobalBatch], step: int
    ) -> tuple[float, float, float] | None:
        """The summed loss, its count, and the label tokens of all batches and ranks; None if a stop was requested.

        The sums of a batch are reduced before the next forward pass, with the stop flags: if a rank is stopped while it
        waits for data, the others must learn of it before they enter a collective of the model without that rank.
        """
        loss, count, num_labels = 0.0, 0.0, 0.0
        mine: tuple[Number, int, int] = (0.0, 0, 0)
        # Each round reduces the sums of the batch before; the extra round those of the last.
        for batch in chain(self._read(batches), [_NO_BATCH]):
            wants_stop = batch is None or self._stop_request.wanted
            loss_here, count_here, num_labels_here = mine
            sums = sum_over_ranks(
                self._layout.gloo_group,
                float(loss_here),
                count_here,
                num_labels_here,
                wants_stop,
            )
            if sums[3] > 0:
                return None
            loss += sums[0]
            count += sums[1]
            num_labels += sums[2]
            mine = self._sums_here(batch or _NO_BATCH, step)
        return loss, count, num_labels

    def _sums_here(self, batch: GlobalBatch, step: int) -> tuple[Number, int, int]:
        """This rank's summed loss, its count, and the label tokens of *batch*; zeros if another rank reports them.

        If the host runs ahead of the device, the loss may be a tensor, which is read when the next batch is there.
        """
        with self._errors.explained(f"in the validation of step {step}", batch):
            loss: Number = 0.0
            self._objective.start_batch(batch.micro_batches)
            for each in self._objective.losses(batch.micro_batches):
                # float64, as in the reduction over the ranks.
                part = each.double()
                loss += part if self._runs_ahead else part.item()
        size = self._objective.size_here(batch.micro_batches)
        return loss if self._layout.reports_loss else 0.0, size.count, size.num_label_tokens

    def _further_metrics(
        self, main: str | None, totals: Mapping[str | None, EvaluationTotals]
    ) -> dict[str, float]:
        """The metrics beside the losses by their names in logs. *main* is the set without a name in them."""
        values = {name: self._objective.summarize(each) for name, each in totals.items()}
        found: dict[str, float] = {}
        for measure in self._measures:
            if measure == LOSS:
                continue
            found[metric_name(measure, None)] = values[main][measure]
            for name, of_set in values.items():
                if name is not None:
                    found[metric_name(measure, name)] = of_set[measure]
        return found


def validation_text(validation: Validation, measures: Iterable[str]) -> str:
    """The metrics of a validation for the log: those of the main set, then those of each named one."""

    def text(loss: float, set_name: str | None) -> str:
        parts = [f"{loss:.4f}"]
        for measure in measures:
            value = validation.further.get(metric_name(measure, set_name))
            if value is not None:
                parts.append(f"{measure} {value:.4g}")
        return ", ".join(parts)

    sets = [text(validation.loss, None)]
    for name, loss in validation.losses.items():
        sets.append(f"{name} {text(loss, name)}")
    return "; ".join(sets)
