"""Whether a run fits into the memory of its device, and which other settings would."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes, share_out
from automodel_ckpt.parallel.precision import resolve_precision
from automodel_ckpt.training.forecast.memory import Memory, estimate_memory
from automodel_ckpt.training.forecast.model_traces import Traces
from automodel_ckpt.training.forecast.step_trace import checkpointing

_USABLE = 0.97
"""The share of a device's memory that a forecast may reach."""
_MOST_RANKS = 64
_BATCH = "step_scheduler.local_batch_size"
_RECOMPUTE = "model.activation_checkpointing"
_STRATEGY, _OFFLOAD = "distributed.strategy", "distributed.cpu_offload"

Changes = Mapping[str, Any]
"""Other values of a recipe, by dotted key."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether a run fits into the memory of its device, and the least expensive settings that fit if it does not.

    *missing_bytes* is how much more memory the device would need. *overrides* are to be pasted after the command, and
    *memory* is the forecast with them. It is None when no settings were found.
    """

    fits: bool
    missing_bytes: int = 0
    overrides: tuple[str, ...] = ()
    memory: Memory | None = None


def advice_for(
    recipe: Any, config: RecipeConfig, device_bytes: int | None, memory: Memory, traces: Traces
) -> Advice | None:
    """Find other settings of a dry run's *recipe*, which needs *memory*, for a device of *device_bytes*.

    *config* is the recipe as it was given, before its data types were resolved. Returns None when the memory of the
    device or of the run is unknown.
    """
    if device_bytes is None or memory.activations is None:
        return None
    usable = _USABLE * device_bytes
    if memory.total <= usable:
        return Advice(fits=True)
    missing = math.ceil(memory.total - usable)
    before: Sizes = recipe.layout.sizes
    for changes, sizes in _candidates(config, recipe.model, before):
        found = _forecast(recipe, _changed(config, changes), sizes, usable, traces)
        if found is not None:
            overrides = [f"--{key}={str(value).lower()}" for key, value in changes.items()]
            if sizes.world != before.world:
                overrides.append(f"--nproc-per-node={sizes.world}")
            return Advice(False, missing, tuple(overrides), found)
    return Advice(False, missing)


def _changed(config: RecipeConfig, changes: Changes) -> RecipeConfig:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: changed})
    return config


def _forecast(
    recipe: Any, config: RecipeConfig, sizes: Sizes, usable: float, traces: Traces
) -> Memory | None:
    """The memory of a dry run's *recipe* with another *config*. Returns None when it does not fit or is unknown."""
    device = recipe.layout.device
    # It shares the model.
    changed = copy.copy(recipe)
    changed.config = resolve_precision(config, sizes, device.type)
    changed.layout = RankLayout(0, sizes, 0, device, None)  # type: ignore[arg-type]
    # A trace of a large model takes seconds.
    if estimate_memory(changed).total > usable:
        return None
    recomputes = _recomputes(config) and not _recomputes(recipe.config)
    with checkpointing(changed.model, recomputes):
        memory = estimate_memory(changed, traces)
    return memory if memory.activations is not None and memory.total <= usable else None


def _recomputes(config: RecipeConfig) -> bool:
    return isinstance(config.model, ModelConfig) and bool(config.model.activation_checkpointing)


def _candidates(config: RecipeConfig, model: Any, sizes: Sizes) -> Iterator[tuple[Changes, Sizes]]:
    """Yield settings of a recipe for *model* that need less memory: first those that cost the least time."""
    section, steps = config.distributed, config.step_scheduler
    sharding = {_STRATEGY: "fsdp2"}
    own = sharding if section.strategy == "ddp" else {}
    plans: list[tuple[Changes, Sizes]] = [({}, sizes)]
    if own and sizes.world > 1:
        plans.append((own, sizes))
    most, num_ranks = sizes, 2 * sizes.world
    while num_ranks <= _MOST_RANKS and section.strategy != "single":
        # The recipe's sizes may not fit this number of ranks.
        with contextlib.suppress(RecipeError):
            most = share_out(num_ranks, **section.mesh_sizes)
            plans.append((own, most))
        num_ranks *= 2
    if not section.cpu_offload:
        for ranks in dict.fromkeys((sizes, most)):
            plans.append(({**sharding, _OFFLOAD: True}, ranks))
    choices: list[Changes] = [{}]
    is_supported = getattr(model, "supports_gradient_checkpointing", False)
    if isinstance(config.model, ModelConfig) and is_supported and not _recomputes(config):
        choices.append({_RECOMPUTE: True})
    for distributed, ranks in plans:
        for choice in choices[-1:] if _OFFLOAD in distributed else choices:
            size = steps.local_batch_size
            while size >= 1:
                smaller = {_BATCH: size} if size != steps.local_batch_size else {}
                changes = {**smaller, **choice, **distributed}
                # Without changes, it is the recipe itself.
                is_other = changes or ranks.world != sizes.world
                if is_other and steps.global_batch_size % (size * ranks.dp) == 0:
                    yield changes, ranks
                size //= 2
