"""Whether a run fits into the memory of its device, and which other settings would."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes, share_out
from automodel_ckpt.parallel.precision import resolve_precision
from automodel_ckpt.training.forecast.memory import Memory, estimate_memory
from automodel_ckpt.training.forecast.model_traces import forget_traces
from automodel_ckpt.training.forecast.step_trace import checkpointing

_USABLE = 0.97
"""The share of a device's memory that a forecast may reach."""
_MOST_RANKS = 64


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
    if _fits(memory, device_bytes):
        return Advice(fits=True)
    missing = math.ceil(memory.total - _USABLE * device_bytes)
    return Advice(False, _proposal(recipe, config, device_bytes), missing)


def _fits(memory: Memory, device_bytes: int) -> bool:
    return memory.total <= _USABLE * device_bytes


def _proposal(recipe: Any, config: RecipeConfig, device_bytes: int) -> Proposal | None:
    """The first settings that fit, by a forecast from few traces of the model, and then by one from its own."""
    for candidate in _candidates(config, recipe.model, recipe.layout.sizes):
        if _forecast(recipe, candidate, device_bytes) is None:
            continue
        forget_traces(recipe)
        memory = _forecast(recipe, candidate, device_bytes)
        if memory is not None:
            return Proposal(candidate.overrides, memory)
    return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Other settings of a recipe, as *overrides* for the command line, and what they make of it."""

    overrides: tuple[str, ...]
    config: RecipeConfig
    sizes: Sizes
    recomputes: bool
    """Whether layers recompute their activations, and did not in the recipe."""


def _forecast(recipe: Any, candidate: _Candidate, device_bytes: int) -> Memory | None:
    """The memory of a dry run's *recipe* with the settings of *candidate*; None if it does not fit or is unknown."""
    device = recipe.layout.device
    # It shares the model.
    changed = copy.copy(recipe)
    changed.config = resolve_precision(candidate.config, candidate.sizes, device.type)
    changed.layout = RankLayout(0, candidate.sizes, 0, device, None)  # type: ignore[arg-type]
    # A trace of a large model takes seconds.
    if not _fits(estimate_memory(changed, with_activations=False), device_bytes):
        return None
    with checkpointing(changed.model, candidate.recomputes):
        memory = estimate_memory(changed)
    is_known = memory.activations is not None
    return memory if is_known and _fits(memory, device_bytes) else None


def _candidates(config: RecipeConfig, model: Any, sizes: Sizes) -> Iterator[_Candidate]:
    """Yield settings of a recipe for *model* that need less memory: first those that cost the least time."""
    section = config.distributed
    can_recompute = (
        isinstance(config.model, ModelConfig)
        and not config.model.activation_checkpointing
        and getattr(model, "supports_gradient_checkpointing", False)
    )
    recomputing = [False, True] if can_recompute else [False]
    replicates = section.strategy == "ddp"
    sharding = {"strategy": "fsdp2"}
    plans: list[tuple[Sizes, Sequence[bool], Mapping[str, Any]]] = [(sizes, recomputing, {})]
    if replicates and sizes.world > 1:
        plans.append((sizes, recomputing, sharding))
    most, num_ranks = sizes, 2 * sizes.world
    while num_ranks <= _MOST_RANKS and section.strategy != "single":
        # The recipe's sizes may not fit this number of ranks.
        with contextlib.suppress(RecipeError):
            most = share_out(num_ranks, **section.mesh_sizes)
            plans.append((most, recomputing, sharding if replicates else {}))
        num_ranks *= 2
    if not section.cpu_offload:
        for ranks in dict.fromkeys((sizes, most)):
            plans.append((ranks, recomputing[-1:], {**sharding, "cpu_offload": True}))
    for ranks, choices, distributed in plans:
        for recomputes in choices:
            size = config.step_scheduler.local_batch_size
            while size >= 1:
                if config.step_scheduler.global_batch_size % (size * ranks.dp) == 0:
                    found = _candidate(config, size, ranks, recomputes, distributed, before=sizes)
                    # Without overrides, it is the recipe itself.
                    if found.overrides:
                        yield found
                size //= 2


def _candidate(
    config: RecipeConfig,
    local_batch_size: int,
    sizes: Sizes,
    recomputes: bool,
    distributed: Mapping[str, Any],
    *,
    before: Sizes,
) -> _Candidate:
    """*config* with these values. *before* is the mesh of the recipe."""
    steps, model = config.step_scheduler, config.model
    overrides: list[str] = []
    if local_batch_size != steps.local_batch_size:
        overrides.append(f"--step_scheduler.local_batch_size={local_batch_size}")
        config = replace(config, step_scheduler=replace(steps, local_batch_size=local_batch_size))
    if recomputes:
        assert isinstance(model, ModelConfig)
        overrides.append("--model.activation_checkpointing=true")
        config = replace(config, model=replace(model, activation_checkpointing=True))
    if sizes.world != before.world:
        overrides.append(f"--nproc-per-node={sizes.world}")
    for key, value in distributed.items():
        overrides.append(f"--distributed.{key}={str(value).lower()}")
    config = replace(config, distributed=replace(config.distributed, **distributed))
    return _Candidate(tuple(overrides), config, sizes, recomputes)
