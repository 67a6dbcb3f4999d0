"""Whether a run fits into the memory of its device, and which other settings would."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.recipes.forecast.candidates import (
    Candidate,
    first_that_fits,
    fits,
    larger_batches,
    missing_bytes,
    smaller,
)
from automodel_ckpt.recipes.forecast.memory import Memory, estimate_memory
from automodel_ckpt.recipes.forecast.model_traces import forget_traces
from automodel_ckpt.recipes.forecast.step_trace import checkpointing
from automodel_ckpt.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether a run fits into the memory of its device, and other settings to paste after the command.

    *overrides* are the first settings that fit if the run does not, empty if none was found; or the largest local batch
    size that fits if the run does, empty if it is the recipe's. *memory* is the forecast with them. *missing_bytes* is
    how much more memory the device would need.
    """

    fits: bool
    overrides: tuple[str, ...] = ()
    memory: Memory | None = None
    missing_bytes: int = 0


def advice_for(
    recipe: Recipe, config: RecipeConfig, device_bytes: int | None, memory: Memory
) -> Advice | None:
    """Find other settings of a dry run's *recipe*, which needs *memory*, for a device of *device_bytes*.

    *config* is the recipe as it was given, before its data types were resolved. Returns None if the memory of the
    device or that of the run is unknown.
    """
    if device_bytes is None or memory.activations is None:
        return None
    sizes = recipe.layout.sizes
    forecasts: dict[tuple[str, ...], Memory] = {}

    def total_of(candidate: Candidate) -> int | None:
        changed = candidate.applied_to(recipe)
        with checkpointing(recipe.model, candidate.recomputes):
            forecast = estimate_memory(changed)
        forecasts[candidate.overrides] = forecast
        return None if forecast.activations is None else forecast.total

    def exact_total_of(candidate: Candidate) -> int | None:
        forget_traces(recipe)
        return total_of(candidate)

    if not fits(memory.total, device_bytes):
        choices = smaller(config, recipe.model, sizes)
        found = first_that_fits(choices, total_of, exact_total_of, device_bytes)
        missing = missing_bytes(memory.total, device_bytes)
        if found is None:
            return Advice(False, missing_bytes=missing)
        return Advice(False, found.overrides, forecasts[found.overrides], missing)
    largest: Candidate | None = None
    for candidate in larger_batches(config, sizes):
        total = total_of(candidate)
        if total is None or not fits(total, device_bytes):
            break
        largest = candidate
    if largest is None:
        return Advice(fits=True)
    return Advice(True, largest.overrides, forecasts[largest.overrides])
