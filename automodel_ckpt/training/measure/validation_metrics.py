"""Which metrics a validation measures, under which names, and which keys of a recipe may name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from automodel_ckpt.config.keys.monitoring import benchmarks_of, has_benchmarks
from automodel_ckpt.config.recipe_rules import has_validation
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.counters.cadence import Cadence
from automodel_ckpt.training.measure.evaluation import ACCURACY, PERPLEXITY
from automodel_ckpt.training.parts.objective import Objective

if TYPE_CHECKING:
    from automodel_ckpt.training.counters.early_stopping import StoppingRule

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
    if loss_fn is not None and not _is_plain_cross_entropy(loss_fn):
        return (LOSS, ACCURACY)
    return (LOSS, ACCURACY, PERPLEXITY)


def _is_plain_cross_entropy(loss_fn: Target) -> bool:
    return loss_fn._target_ in _PLAIN_LOSSES and set(loss_fn.kwargs) <= _PLAIN_OPTIONS


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
    from automodel_ckpt.training.counters.early_stopping import StoppingRule

    return StoppingRule(metric, mode, section.patience, section.min_delta)


def _check_known(key: str, metric: str, known: Collection[str]) -> None:
    # Which metrics a task has is known only when it has run.
    is_benchmark = metric.startswith(BENCHMARK) and _ANY_TASK in known
    if metric not in known and not is_benchmark:
        raise RecipeError(
            "nothing measures this metric",
            where=key,
            value=metric,
            hint=f"this run measures {', '.join(known)}",
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


def cadence_of(config: RecipeConfig) -> Cadence:
    """The ``step_scheduler`` section as intervals: when to save, validate and end."""
    steps = config.step_scheduler
    is_automatic = steps.ckpt_every_steps == "auto"
    return Cadence(
        max_steps=steps.max_steps,
        num_epochs=steps.effective_num_epochs,
        ckpt_every_steps=None if steps.ckpt_every_steps == "auto" else steps.ckpt_every_steps,
        mtbf_seconds=3600 * steps.mtbf_hours if is_automatic else None,
        ckpt_every_epochs=steps.ckpt_every_epochs,
        ckpt_every_minutes=steps.ckpt_every_minutes,
        ckpt_on_best=steps.ckpt_on_best,
        val_every_steps=steps.val_every_steps,
        max_time_seconds=steps.max_time_seconds,
        has_validation=has_validation(config),
        has_benchmarks=has_benchmarks(config),
        bench_every_steps=tuple(each.every_steps for each in benchmarks_of(config)),
        early_stopping=stopping_rule(config),
        stop_after_nonfinite_steps=steps.stop_after_nonfinite_steps,
        on_spike=steps.on_spike,
    )


def steps_per_epoch(loader: GlobalBatchLoader) -> int | None:
    """Optimizer steps of a complete epoch. Returns None for a stream: its length is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None
