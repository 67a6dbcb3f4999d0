"""What is measured at a step beside its training loss: validations, benchmarks and completions, and their records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from automodel_ckpt.checkpoint.run import timeline
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.measure.validation import validation_text
from automodel_ckpt.training.measure.validation_metrics import BENCHMARK
from automodel_ckpt.training.saves.saves import Saves
from automodel_ckpt.training.values.records import StepResult, Validation
from automodel_ckpt.training.values.run_log import RunLog

if TYPE_CHECKING:
    from automodel_ckpt.models.measure.harness import TaskMetric
    from automodel_ckpt.training.measure.completions import Completions
    from automodel_ckpt.training.measure.weight_average import WeightAverage

log = logging.getLogger("automodel_ckpt")


class Benchmark(Protocol):
    """A section of ``evaluation``, which computes metrics of the model in training."""

    every_steps: int | None
    """It runs after every N steps, and at the end; None: only at the end."""

    def run(self) -> Sequence[TaskMetric] | None:
        """Compute the metrics; None if a stop was requested meanwhile. A collective; the same on all ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured at a step: its *validation*, None if none was due, and the *benchmarks*, empty if none were."""

    validation: Validation | None
    benchmarks: Sequence[TaskMetric]

    @property
    def anything(self) -> bool:
        """Whether something was measured."""
        return self.validation is not None or bool(self.benchmarks)


class Measurements:
    """Measures the model at the present step, and writes the results to the logs. Every method is a collective."""

    def __init__(self, recipe: Any, measures: Sequence[str]) -> None:
        """*recipe* has the parts of the run. *measures* are what validations measure."""
        self._config: RecipeConfig = recipe.config
        self._scheduler: StepScheduler = recipe.step_scheduler
        self._saves: Saves = recipe.saves
        self._run_log: RunLog = recipe.run_log
        self._weight_average: WeightAverage | None = recipe.weight_average
        self._benchmarks: Sequence[Benchmark] = recipe.build_benchmarks()
        self._completions: Completions | None = recipe.build_completions()
        self._measures = measures

    def take(
        self, validate: Callable[[], Validation | None] | None, last_step: StepResult | None
    ) -> Measured | None:
        """Validate with *validate*, if it is given, and run the benchmarks, if they are due.

        Returns None if a stop was requested meanwhile; the next start then makes up for what is missing. *last_step* is
        for the log.
        """
        validation = None
        if validate is not None:
            validation = self._validated(validate, last_step)
            if validation is None:
                return None
        if not self._scheduler.benchmarks_are_missing:
            return Measured(validation, ())
        found = self._run_benchmarks()
        if found is None:
            if validation is not None:
                self._scheduler.repeat_validation()
            return None
        return Measured(validation, found)

    def benchmark_values(self, metrics: Sequence[TaskMetric]) -> dict[str, float | None]:
        """The values of *metrics* by name, and null for one that the recipe names and whose benchmark has not run."""
        values: dict[str, float | None] = {each.name: each.value for each in metrics}
        rule = self._scheduler.cadence.early_stopping
        named = [self._config.checkpoint.best_metric_key, rule.metric if rule is not None else ""]
        for name in named:
            if name.startswith(BENCHMARK) and not metrics:
                values[name] = None
        return values

    def _validated(
        self, validate: Callable[[], Validation | None], last_step: StepResult | None
    ) -> Validation | None:
        with self._run_log.timeline.phase(timeline.VALIDATION), self._validated_weights():
            validation = validate()
            if validation is None:
                return None
            self._log_validation(validation, last_step)
            if self._completions is not None:
                texts = self._completions.at(self._scheduler.step)
                self._run_log.log_completions(self._scheduler, texts)
        return validation

    def _run_benchmarks(self) -> Sequence[TaskMetric] | None:
        """The metrics of the benchmarks that are due; None if a stop was requested meanwhile."""
        scheduler = self._scheduler
        metrics: list[TaskMetric] = []
        with self._run_log.timeline.phase(timeline.VALIDATION), self._validated_weights():
            for benchmark in self._benchmarks:
                if scheduler.benchmark_is_due(benchmark.every_steps):
                    found = benchmark.run()
                    if found is None:
                        return None
                    metrics += found
        scheduler.note_benchmarks()
        # A start after a time limit may have nothing to make up for: its run is not at its end.
        if metrics:
            texts = [f"{each.task} {each.metric} {each.value:.4f}" for each in metrics]
            log.info("step %d: %s", scheduler.step, ", ".join(texts))
            self._run_log.log_benchmarks(scheduler, metrics)
        return metrics

    @contextmanager
    def _validated_weights(self) -> Iterator[None]:
        """Within the context, the model has the weights that validations measure: with ``ema.validate`` the average."""
        if self._weight_average is None or not self._validates_average:
            yield
            return
        self._saves.await_copies()
        with self._weight_average.in_model():
            yield

    @property
    def _validates_average(self) -> bool:
        section = self._config.ema
        return section is not None and section.validate

    def _log_validation(self, validation: Validation, last_step: StepResult | None) -> None:
        scheduler = self._scheduler
        scheduler.note_validated()
        train_loss = last_step.loss if last_step is not None else None
        figures = self._run_log.figures({"train_loss": train_loss})
        of = " of the average" if self._validates_average else ""
        measured = validation_text(validation, self._measures)
        text = f"step {scheduler.step}: validation loss{of} {measured}"
        log.info("%s", f"{text}; {figures}" if figures else text)
        self._run_log.log_validation(scheduler, validation)
