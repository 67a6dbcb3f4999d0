"""The section ``step_scheduler`` as intervals: when to save, validate and end, and after which losses to go back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel_ckpt.config.keys.evaluation import benchmarks_of, has_benchmarks
from automodel_ckpt.config.keys.step_scheduler import OnSpikeConfig
from automodel_ckpt.config.recipe_rules import has_validation
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.training.counters.cadence import Cadence
from automodel_ckpt.training.measure.validation_metrics import stopping_rule

if TYPE_CHECKING:
    from automodel_ckpt.training.counters.spikes import SpikeRule


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
        on_spike=spike_rule(steps.on_spike),
    )


def spike_rule(section: OnSpikeConfig | None) -> SpikeRule | None:
    """The section ``step_scheduler.on_spike`` as a rule; None without it."""
    if section is None:
        return None
    from automodel_ckpt.training.counters.spikes import SpikeRule

    return SpikeRule(
        loss_factor=section.loss_factor,
        grad_norm_factor=section.grad_norm_factor,
        window=section.window,
        rollback=section.rollback,
        skip=section.skip or section.rollback,
        max_rollbacks=section.max_rollbacks,
    )


def steps_per_epoch(loader: GlobalBatchLoader) -> int | None:
    """Optimizer steps of a complete epoch; None for a stream, whose length is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None
