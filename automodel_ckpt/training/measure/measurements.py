"""What a step measures other than its training loss: validations, benchmarks and completions, and their records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from automodel_ckpt.checkpoint.run.notes import VALIDATION
from automodel_ckpt.config.recipe_rules import harness_of, has_validation
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.parallel.ranks.agree import sum_over_ranks
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import (
    ACCURACY,
    PERPLEXITY,
    EvaluationTotals,
    Number,
    Validation,
    sum_by_name,
)
from automodel_ckpt.training.values.run_log import RunLog

if TYPE_CHECKING:
    from automodel_ckpt.models.measure.harness import TaskMetric
    from automodel_ckpt.training.counters.rules import StoppingRule
    from automodel_ckpt.training.measure.evaluated_model import Completions, HarnessBenchmark
    from automodel_ckpt.training.measure.weight_average import WeightAverage

log = logging.getLogger("automodel_ckpt")

LOSS = "loss"
DEFAULT_METRIC = "val_loss"
"""``checkpoint.best_metric_key`` of a recipe without the key."""
TRAIN_LOSS = "train_loss"
"""The training loss of the last step, in ``losses.json``."""
RISING = (
    ACCURACY,
    "margin",
    "reward_chosen",
    "reward_desirable",
    "f1",
    "pearson",
    "mrr",
    "recall_at_10",
)
"""Measures that a better model has a higher value of; of all others it has a lower one."""
BENCHMARK = "eval_"
"""Metrics of the section ``evaluation`` begin with this."""
_ANY_TASK = f"{BENCHMARK}TASK_METRIC"
_FALLING_ENDS = ("perplexity", "_bits_per_byte", "_brier_score", "_loss", "_ter", "_wer")
"""Ends of the names of those metrics that a better model has a lower value of."""
_PLAIN_LOSSES = ("torch.nn.CrossEntropyLoss", "torch.nn.functional.cross_entropy")
_PLAIN_OPTIONS = {"reduction", "ignore_index"}


def measures_of(objective_class: type[Objective], loss_fn: Target | None) -> tuple[str, ...]:
    """List what a validation with this objective and ``loss_fn`` section measures in addition to the loss.

    The accuracy counts the labels of an objective that predicts the next token. The perplexity is the exponential of
    the mean cross-entropy, so another loss has none. An objective with ``measures`` lists them itself.
    """
    if objective_class.measures is not None:
        return (LOSS, *objective_class.measures)
    replaced = (
        objective_class.loss is not Objective.loss
        or objective_class.losses is not Objective.losses
        or objective_class.row_loss is not Objective.row_loss
        or objective_class.size_of is not Objective.size_of
    )
    if replaced:
        return (LOSS,)
    is_plain = loss_fn is None or (
        loss_fn._target_ in _PLAIN_LOSSES and set(loss_fn.kwargs) <= _PLAIN_OPTIONS
    )
    return (LOSS, ACCURACY, PERPLEXITY) if is_plain else (LOSS, ACCURACY)


def metric_name(measure: str, set_name: str | None) -> str:
    """The name of a measure of a validation set in logs and ``losses.json``. None is the main set."""
    name = f"val_{measure}"
    return name if set_name is None else f"{name}_{set_name}"


def metric_names(measures: Iterable[str], set_names: Collection[str]) -> Iterator[str]:
    """Yield the names of all metrics of a validation of the main set and of the sets *set_names*."""
    for measure in measures:
        yield metric_name(measure, None)
        for name in set_names:
            yield metric_name(measure, name)


def validate_metric_keys(config: RecipeConfig, known: Collection[str]) -> None:
    """Check the keys of a recipe that name a metric. *known* are those that the run measures.

    Raises :class:`RecipeError` for another name, and if the best value of a rising measure would be the lowest.
    """
    section = config.checkpoint
    known = list(known)
    benchmarks = config.evaluation
    if benchmarks is not None and benchmarks.harness is not None:
        known.append(_ANY_TASK)
    if has_validation(config) or section.best_metric_key != DEFAULT_METRIC:
        _check_known("checkpoint.best_metric_key", section.best_metric_key, known)
    rising = rising_measure(section.best_metric_key)
    if rising is not None and section.best_mode == "min":
        raise RecipeError(
            f"with best_mode min, the best checkpoint would be the one with the lowest {rising}",
            where="checkpoint.best_metric_key",
            value=section.best_metric_key,
            hint="set checkpoint.best_mode: max",
        )
    rule = stopping_rule(config)
    if rule is not None:
        # The training loss covers one batch, and is unknown after a resume.
        measured = [name for name in known if name != TRAIN_LOSS]
        _check_known("step_scheduler.early_stopping.metric", rule.metric, measured)


def stopping_rule(config: RecipeConfig) -> StoppingRule | None:
    """The section ``step_scheduler.early_stopping`` with its metric and the direction in which that improves.

    The best metric has the direction of ``best_mode``. Other metrics improve upwards if they are in :data:`RISING`,
    otherwise downwards.
    """
    section = config.step_scheduler.early_stopping
    if section is None:
        return None
    metric = section.metric or config.checkpoint.best_metric_key
    mode = config.checkpoint.best_mode
    if metric != config.checkpoint.best_metric_key:
        mode = "min" if rising_measure(metric) is None else "max"
    from automodel_ckpt.training.counters.rules import StoppingRule

    return StoppingRule(metric, mode, section.patience, section.min_delta)


def _check_known(key: str, metric: str, known: Collection[str]) -> None:
    # Which metrics a task has is known only when it has run.
    is_benchmark = metric.startswith(BENCHMARK) and _ANY_TASK in known
    if metric not in known and not is_benchmark:
        raise RecipeError(
            "nothing measures this metric",
            where=key,
            value=f"{metric}; this run measures {', '.join(known)}",
        )


def rising_measure(metric: str) -> str | None:
    """The measure of a metric, if a better model has a higher value of it. Returns None for others."""
    if metric.startswith(BENCHMARK):
        falls = metric.endswith(_FALLING_ENDS)
        return None if falls else metric
    for measure in RISING:
        name = metric_name(measure, None)
        if metric == name or metric.startswith(f"{name}_"):
            return measure
    return None


def steps_per_epoch(loader: GlobalBatchLoader) -> int | None:
    """Optimizer steps of a complete epoch. Returns None for a stream: its length is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


Batches = Callable[[], Iterator[GlobalBatch]]
"""Reads a validation set from its start."""
_NO_BATCH = GlobalBatch(0, 0, 0, [], [], last_of_epoch=True)


class ValidationSets:
    """Computes the loss and the metrics of each validation set of a run.

    It leaves no trace in the training: no gradients, and random states are restored. Every method is called on all
    ranks.
    """

    def __init__(self, loop: Any) -> None:
        """*loop* is the training loop, which has the parts of the run."""
        self._loop = loop
        self._objective: Objective = loop.objective
        self._trainable = self._objective.trainable
        self._layout = self._objective.layout
        self._sets: dict[str | None, Batches] = {}
        """By name. The loss of the first one is ``val_loss``. The name of ``validation_dataset`` is None."""
        if loop.validation_batches is not None:
            self._sets[None] = loop.validation_batches
        self._sets.update(loop.validation_sets)

    def measure(self, step: int) -> Validation | None:
        """Compute the mean loss over each set after *step*. Returns None when a stop was requested meanwhile."""
        model = self._trainable.model
        totals: dict[str | None, EvaluationTotals] = {}
        if self._trainable.fake_quantization is not None:
            # A run that has just been resumed has made no step.
            self._trainable.fake_quantization.start(max(1, step))
        model.eval()
        try:
            with torch.no_grad(), self._loop.rng.preserved():
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
        main_name, main = next(iter(totals.items()))
        further = self._further_metrics(main_name, totals)
        return Validation(main.mean_loss, main.num_label_tokens, main.count, further)

    def _totals_of(self, batches: Iterable[GlobalBatch], step: int) -> EvaluationTotals | None:
        """The totals of one set over all ranks. Returns None when a stop was requested.

        The sums of a batch are reduced before the next forward pass, with the stop flags: if a rank is stopped while it
        waits for data, the others must know before they enter a collective of the model without that rank.
        """
        group = self._layout.gloo_group
        totals = [0.0, 0.0, 0.0]
        mine: tuple[Number, int, int] = (0.0, 0, 0)
        with self._objective.evaluating() as measured:
            # Each round reduces the sums of the batch before. The extra round reduces the sums of the last batch.
            for batch in chain(self._loop.batches(batches), [_NO_BATCH]):
                wants_stop = batch is None or self._loop.stop_request.wanted
                loss_here, *counts_here = mine
                *sums, num_stops = sum_over_ranks(group, float(loss_here), *counts_here, wants_stop)
                if num_stops > 0:
                    return None
                totals = [before + more for before, more in zip(totals, sums, strict=True)]
                mine = self._sums_here(batch or _NO_BATCH, step)
        # Context parallel ranks count different labels, as they sum the loss of different ones.
        here = measured.read() if self._layout.reports_loss else {}
        loss, count, num_labels = totals
        return EvaluationTotals(loss, int(count), int(num_labels), sum_by_name(group, here))

    def _sums_here(self, batch: GlobalBatch, step: int) -> tuple[Number, int, int]:
        """This rank's summed loss, its count, and the label tokens of *batch*. Zeros if another rank reports them.

        If the host runs ahead of the device, the loss may be a tensor, which is read when the next batch is there.
        """
        with self._loop.errors.explained(f"in the validation of step {step}", batch):
            loss: Number = 0.0
            self._objective.start_batch(batch.micro_batches)
            for each in self._objective.losses(batch.micro_batches):
                # float64, as in the reduction over the ranks.
                part = each.double()
                loss += part if self._loop.runs_ahead else part.item()
        size = self._objective.size_here(batch.micro_batches)
        return loss if self._layout.reports_loss else 0.0, size.count, size.num_label_tokens

    def _further_metrics(
        self, main: str | None, totals: Mapping[str | None, EvaluationTotals]
    ) -> dict[str, float]:
        """All metrics but the loss of the set *main*, by their names in logs. Set *main* has no name in them."""
        found: dict[str, float] = {}
        values: dict[str | None, Mapping[str, float]] = {}
        for name, each in totals.items():
            values[name] = {LOSS: each.mean_loss, **self._objective.summarize(each)}
        for measure in self._loop.measures:
            found[metric_name(measure, None)] = values[main][measure]
            for name, of_set in values.items():
                if name is not None:
                    found[metric_name(measure, name)] = of_set[measure]
        return found


def validation_text(validation: Validation, measures: Iterable[str], sets: Iterable[str]) -> str:
    """The metrics of a validation for the log: first for the main set, then for each of the named *sets*."""
    texts = []
    for set_name in (None, *sets):
        loss = validation.metrics.get(metric_name(LOSS, set_name))
        # A loop of the user may not measure each set.
        if loss is None:
            continue
        parts = [f"{loss:.4f}" if set_name is None else f"{set_name} {loss:.4f}"]
        for measure in measures:
            value = validation.metrics.get(metric_name(measure, set_name))
            if value is not None and measure != LOSS:
                parts.append(f"{measure} {value:.4g}")
        texts.append(", ".join(parts))
    return "; ".join(texts)


class Measurements:
    """Measures the model at the present step, and writes the results to the logs. Every method is a collective."""

    def __init__(self, recipe: Any, loop: Any) -> None:
        """*recipe* and its training *loop* have the parts of the run."""
        self._loop = loop
        self._config: RecipeConfig = recipe.config
        self._scheduler: StepScheduler = recipe.step_scheduler
        self._run_log: RunLog = recipe.run_log
        self._benchmark: HarnessBenchmark | None = None
        self._completions: Completions | None = None
        harness, generation = harness_of(self._config), self._config.generation
        if harness is not None:
            from automodel_ckpt.training.measure.evaluated_model import HarnessBenchmark

            self._benchmark = HarnessBenchmark(harness, recipe)
        if generation is not None:
            from automodel_ckpt.training.measure.evaluated_model import Completions

            self._completions = Completions(generation, recipe)
        section = self._config.ema
        self._weight_average: WeightAverage | None = None
        """What validations measure in place of the weights."""
        if section is not None and section.validate:
            self._weight_average = recipe.weight_average

    def take(self, *, validate: bool) -> tuple[dict[str, Any], bool]:
        """Validate, if that is due, and run the benchmark, if it is due.

        Returns the content of ``losses.json`` with the metrics of the benchmark, and whether anything was measured.
        Raises :class:`Stopped` if a stop was requested meanwhile. The next start then makes up for what is missing.
        """
        validation = self._validated() if validate else None
        metrics: Sequence[TaskMetric] = ()
        if self._scheduler.benchmark_is_due:
            found = self._run_benchmark()
            if found is None:
                # The stop saves the step without its validation.
                self._scheduler.validation_is_due = validation is not None
                self._loop.stop()
            metrics = found or ()
        losses = dict(self._loop.losses(validation))
        losses.update({each.name: each.value for each in metrics})
        best_metric = self._config.checkpoint.best_metric_key
        if best_metric.startswith(BENCHMARK) and not metrics:
            # Its benchmark has not run after this step.
            losses[best_metric] = None
        return losses, validation is not None or bool(metrics)

    def make_up(self) -> None:
        """Run the validation that a stop prevented before the present start. The step's checkpoint exists already.

        Afterwards the best value so far, and its checkpoint, are the same as in a run that was not stopped.
        """
        scheduler = self._scheduler
        if scheduler.validation_is_due or scheduler.benchmark_is_due:
            log.info("validating step %d, which a signal had prevented", scheduler.step)
            losses, _ = self.take(validate=scheduler.validation_is_due)
            self._loop.saves.note_late_validation(losses)
            scheduler.note_metrics(losses)

    def _validated(self) -> Validation:
        scheduler = self._scheduler
        with self._run_log.timeline.phase(VALIDATION), self._validated_weights():
            validation: Validation | None = self._loop.validate()
            if validation is not None:
                self._log_validation(validation)
                if self._completions is not None:
                    texts = self._completions.at(scheduler.step)
                    self._run_log.log_completions(scheduler, texts)
        if validation is None:
            self._loop.stop()
        assert validation is not None
        return validation

    def _run_benchmark(self) -> Sequence[TaskMetric] | None:
        """The metrics of the benchmark, which is due. Returns None when a stop was requested meanwhile."""
        scheduler, benchmark = self._scheduler, self._benchmark
        metrics: Sequence[TaskMetric] | None = ()
        # A start after a time limit may have nothing to make up for: its run is not at its end.
        if benchmark is not None and scheduler.benchmark_is_wanted():
            with self._run_log.timeline.phase(VALIDATION), self._validated_weights():
                metrics = benchmark.run()
        if metrics is None:
            return None
        scheduler.benchmark_is_due = False
        if metrics:
            texts = [f"{each.task} {each.metric} {each.value:.4f}" for each in metrics]
            log.info("step %d: %s", scheduler.step, ", ".join(texts))
            self._run_log.log_benchmarks(scheduler, metrics)
        return metrics

    @contextmanager
    def _validated_weights(self) -> Iterator[None]:
        """Within the context, the model has the weights that validations measure: with ``ema.validate`` the average."""
        if self._weight_average is None:
            yield
            return
        self._loop.saves.await_copies()
        with self._weight_average.in_model():
            yield

    def _log_validation(self, validation: Validation) -> None:
        scheduler = self._scheduler
        scheduler.validation_is_due = False
        of = " of the average" if self._weight_average is not None else ""
        measured = validation_text(validation, self._loop.measures, self._loop.validation_sets)
        self._run_log.log_validation(
            scheduler,
            validation,
            f"validation loss{of} {measured}",
            is_followed=scheduler.unsaved
            and scheduler.save_was_due
            and bool(self._loop.checkpointer),
        )
