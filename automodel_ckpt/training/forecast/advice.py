"""Whether a run fits into the memory of its device, and which other settings would."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.forecast.candidates import (
    Candidate,
    compact,
    fits,
    is_offloaded,
    larger_batches,
    missing_bytes,
    offloaded,
    smaller,
)
from automodel_ckpt.training.forecast.memory import Memory, estimate_memory
from automodel_ckpt.training.forecast.model_traces import forget_traces
from automodel_ckpt.training.forecast.step_trace import checkpointing
from automodel_ckpt.training.recipe import Recipe

log = logging.getLogger(__name__)

_COST_OF_OFFLOADING = "slow: the optimizer runs on the CPU"
_COST_OF_COMPACT_STATE = "gradients in bfloat16, moments in 8 bits"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Other settings of a recipe: *overrides* to paste after the command, and the forecast with them."""

    overrides: tuple[str, ...]
    memory: Memory
    cost: str = ""
    """What the settings cost, if that is more than time that is repeated in the backward pass."""
    needs_new_run: bool = False
    """Whether no run with the present settings can continue with them."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether a run fits into the memory of its device, and other settings.

    *proposals* are settings that fit if the run does not: the first one that was found, and if that one needs more
    ranks, or none was found, settings for the same number of ranks that cost precision or much time. If the run fits,
    *larger* has the largest local batch size that fits as well; None if it is the recipe's. *missing_bytes* is how much
    more memory the device would need.
    """

    fits: bool
    proposals: tuple[Proposal, ...] = ()
    larger: Proposal | None = None
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
    if fits(memory.total, device_bytes):
        return Advice(fits=True, larger=_larger(recipe, config, device_bytes))
    return Advice(
        fits=False,
        proposals=tuple(_proposals(recipe, config, device_bytes)),
        missing_bytes=missing_bytes(memory.total, device_bytes),
    )


def _proposals(recipe: Recipe, config: RecipeConfig, device_bytes: int) -> Iterator[Proposal]:
    """Yield the settings that fit: the least expensive ones, then others that need no further ranks."""
    model, sizes = recipe.model, recipe.layout.sizes
    forecasts = _Forecasts(recipe, device_bytes)
    first = forecasts.first_that_fits(smaller(config, model, sizes))
    is_slow = first is not None and is_offloaded(first) and not config.distributed.cpu_offload
    if first is not None:
        yield forecasts.proposal(first, _COST_OF_OFFLOADING if is_slow else "")
        if first.sizes == sizes and not is_slow:
            return
    if recipe.layout.device.type == "cuda":
        yield from _compact_proposal(recipe, config, device_bytes)
    if is_slow:
        return
    found = forecasts.first_that_fits(offloaded(config, model, sizes, before=sizes))
    if found is not None:
        yield forecasts.proposal(found, _COST_OF_OFFLOADING)


def _compact_proposal(
    recipe: Recipe, config: RecipeConfig, device_bytes: int
) -> Iterator[Proposal]:
    """Yield the settings that fit with less bytes for each weight, if there are any."""
    candidates = compact(config, recipe.model, recipe.layout.sizes)
    first = next(candidates, None)
    if first is None:
        return
    try:
        # All have the same model and optimizer.
        forecasts = _Forecasts(_rebuilt(first.applied_to(recipe)), device_bytes)
        found = forecasts.first_that_fits(itertools.chain([first], candidates))
    except RecipeError as error:
        # A recipe's own class can do more with its optimizer.
        log.debug("no forecast for %s: %s", first.overrides, error)
        return
    if found is not None:
        proposal = forecasts.proposal(found, _COST_OF_COMPACT_STATE)
        yield replace(proposal, needs_new_run=True)


def _rebuilt(recipe: Recipe) -> Recipe:
    """*recipe*, which is returned, with the model, the optimizer and the schedule of its sections, without values."""
    recipe.trainable = recipe.build_trainable()
    recipe.model = recipe.trainable.model
    recipe.optimizer = recipe.build_optimizer()
    recipe.lr_scheduler = recipe.build_lr_scheduler()
    return recipe


def _larger(recipe: Recipe, config: RecipeConfig, device_bytes: int) -> Proposal | None:
    """The largest local batch size that fits into a device; None if it is the recipe's."""
    forecasts = _Forecasts(recipe, device_bytes)
    largest: Candidate | None = None
    for candidate in larger_batches(config, recipe.layout.sizes):
        if not forecasts.fits(candidate):
            break
        largest = candidate
    return None if largest is None else forecasts.proposal(largest)


class _Forecasts:
    """The forecasts of candidates of a *recipe* for a device of *device_bytes*."""

    def __init__(self, recipe: Recipe, device_bytes: int) -> None:
        self._recipe = recipe
        self._device_bytes = device_bytes
        self._found: dict[tuple[str, ...], Memory] = {}

    def first_that_fits(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The first candidate that fits, by a forecast from few traces of the model, and then by one from its own."""
        for candidate in candidates:
            if self.fits(candidate):
                forget_traces(self._recipe)
                if self.fits(candidate):
                    return candidate
        return None

    def fits(self, candidate: Candidate) -> bool:
        """Whether the forecast of *candidate* is known and fits."""
        changed = candidate.applied_to(self._recipe)
        # A trace of a large model takes seconds.
        if not fits(estimate_memory(changed, with_activations=False).total, self._device_bytes):
            return False
        with checkpointing(changed.model, candidate.recomputes):
            forecast = estimate_memory(changed)
        self._found[candidate.overrides] = forecast
        return forecast.activations is not None and fits(forecast.total, self._device_bytes)

    def proposal(self, candidate: Candidate, cost: str = "") -> Proposal:
        """A candidate that fits, with its forecast."""
        return Proposal(candidate.overrides, self._found[candidate.overrides], cost)
