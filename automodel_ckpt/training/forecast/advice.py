"""Whether a run fits into the memory of its device, and which other settings would."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.training.forecast.candidates import (
    Candidate,
    fits,
    missing_bytes,
    smaller,
)
from automodel_ckpt.training.forecast.memory import Memory, estimate_memory
from automodel_ckpt.training.forecast.model_traces import forget_traces
from automodel_ckpt.training.forecast.step_trace import checkpointing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Other settings of a recipe: *overrides* to paste after the command, and the forecast with them."""

    overrides: tuple[str, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether a run fits into the memory of its device, and other settings.

    *proposal* has the least expensive settings that fit if the run does not; None if none were found. *missing_bytes*
    is how much more memory the device would need.
    """

    fits: bool
    proposal: Proposal | None = None
    missing_bytes: int = 0


def advice_for(
    recipe: Any, config: RecipeConfig, device_bytes: int | None, memory: Memory
) -> Advice | None:
    """Find other settings of a dry run's *recipe*, which needs *memory*, for a device of *device_bytes*.

    *config* is the recipe as it was given, before its data types were resolved. Returns None if the memory of the
    device or that of the run is unknown.
    """
    if device_bytes is None or memory.activations is None:
        return None
    if fits(memory.total, device_bytes):
        return Advice(fits=True)
    return Advice(
        fits=False,
        proposal=_proposal(recipe, config, device_bytes),
        missing_bytes=missing_bytes(memory.total, device_bytes),
    )


def _proposal(recipe: Any, config: RecipeConfig, device_bytes: int) -> Proposal | None:
    """The least expensive settings that fit."""
    forecasts = _Forecasts(recipe, device_bytes)
    found = forecasts.first_that_fits(smaller(config, recipe.model, recipe.layout.sizes))
    return None if found is None else forecasts.proposal(found)


class _Forecasts:
    """The forecasts of candidates of a *recipe* for a device of *device_bytes*."""

    def __init__(self, recipe: Any, device_bytes: int) -> None:
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

    def proposal(self, candidate: Candidate) -> Proposal:
        """A candidate that fits, with its forecast."""
        return Proposal(candidate.overrides, self._found[candidate.overrides])
