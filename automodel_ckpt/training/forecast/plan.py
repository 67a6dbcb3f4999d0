"""The steps, the memory and the size of checkpoints that a recipe would need, without allocating its model."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.saving.save import Assets, forecast_bytes
from automodel_ckpt.checkpoint.state.model_config import CONFIG
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import device_type
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes, share_out
from automodel_ckpt.training.counters.step_scheduler import planned_end
from automodel_ckpt.training.forecast.memory import Memory, estimate_memory
from automodel_ckpt.training.forecast.rank_parts import (
    MicroBatchShape,
    RankParts,
    micro_batch_shape,
)
from automodel_ckpt.training.forecast.step_trace import Traces, checkpointing
from automodel_ckpt.training.measure.measurements import steps_per_epoch
from automodel_ckpt.training.model.sections import resolve_precision
from automodel_ckpt.training.recipe import Recipe, check_classes
from automodel_ckpt.training.recipe_parts import check_export, check_uploads
from automodel_ckpt.training.resume import commits_of_run, pin_base

_USABLE = 0.97
"""The share of a device's memory that a forecast may reach."""
_MOST_RANKS = 64
_BATCH = "step_scheduler.local_batch_size"
_RECOMPUTE = "model.activation_checkpointing"
_STRATEGY, _OFFLOAD = "distributed.strategy", "distributed.cpu_offload"

Changes = Mapping[str, Any]
"""Other values of a recipe, by dotted key."""


@dataclass(frozen=True)
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
        changed = config
        for key, value in changes.items():
            section, _, name = key.partition(".")
            of_section = replace(getattr(changed, section), **{name: value})
            changed = replace(changed, **{section: of_section})
        found = _forecast(recipe, changed, sizes, usable, traces)
        if found is not None:
            overrides = [f"--{key}={str(value).lower()}" for key, value in changes.items()]
            if sizes.world != before.world:
                overrides.append(f"--nproc-per-node={sizes.world}")
            return Advice(False, missing, tuple(overrides), found)
    return Advice(False, missing)


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


@dataclass(frozen=True)
class ForecastDevice:
    """The device that a forecast is for: its *type*, ``cuda`` or ``cpu``, and its memory. None means not limited."""

    type: str
    nbytes: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Plan:
    """A forecast of a run."""

    model: str
    """The class of the model."""
    num_parameters: int
    num_trained: int
    steps: int | None
    """The steps of the run. None when they are unknown."""
    steps_per_epoch: int | None
    """The steps of an epoch. None when they are unknown."""
    memory: Memory
    micro_batch: MicroBatchShape | None
    """The size of the micro-batch that *memory* is for, with the longest samples. None when it is unknown."""
    checkpoint_bytes: int | None
    """The size of one checkpoint. None when the run saves none."""
    config_json: bytes | None = None
    """The content of the model's config.json. None with adapters and for a model by ``_target_``."""
    end: str = ""
    """A sentence about what will end the run."""
    device: ForecastDevice | None = None
    advice: Advice | None = None
    """Whether the memory of the device suffices, and other settings. None when this is unknown."""


def device_here(recipe: Any) -> ForecastDevice:
    """The device that *recipe* would train on here: the GPU of this machine, or its CPU."""
    if device_type(recipe.config.distributed.backend) == "cpu":
        return ForecastDevice("cpu")
    properties = torch.cuda.get_device_properties(0)
    return ForecastDevice("cuda", properties.total_memory, properties.name)


def plan(recipe: Any, sizes: Sizes, device: ForecastDevice | None = None) -> Plan:
    """Build *recipe* without weights for a mesh of *sizes*, and forecast what it needs on *device*.

    The default is the device of this machine. Raises :class:`RecipeError` if the recipe could not train.
    """
    device = device or device_here(recipe)
    given = recipe.config
    _build_without_weights(recipe, sizes, device)
    parameters = list(recipe.model.parameters())
    traces: Traces = {}
    memory = estimate_memory(recipe, traces)
    is_saved = recipe.config.checkpoint.enabled
    assets = recipe.build_assets() if is_saved else {}
    has_config = bool(assets) and recipe.config.peft is None
    steps_of_epoch = steps_per_epoch(recipe.dataloader)
    return Plan(
        model=type(recipe.model).__name__,
        num_parameters=sum(each.numel() for each in parameters),
        num_trained=sum(each.numel() for each in parameters if each.requires_grad),
        steps=recipe.step_scheduler.planned_steps,
        steps_per_epoch=steps_of_epoch,
        memory=memory,
        micro_batch=micro_batch_shape(recipe),
        checkpoint_bytes=_checkpoint_bytes(recipe, assets) if is_saved else None,
        config_json=assets["model"].files[CONFIG] if has_config else None,
        end=planned_end(recipe.step_scheduler.settings, steps_of_epoch),
        device=device,
        advice=advice_for(recipe, given, device.nbytes, memory, traces),
    )


def _build_without_weights(recipe: Any, sizes: Sizes, device: ForecastDevice) -> None:
    """Do what :meth:`Recipe.setup` does before the resume, with a model on the meta device."""
    recipe.is_dry_run = True
    # No process group: collectives return this rank's own values.
    # Nothing is allocated on the device, but it decides about data types.
    recipe.layout = RankLayout(0, sizes, 0, torch.device(device.type), None)  # type: ignore[arg-type]
    check_classes(recipe, Recipe)
    recipe.config = resolve_precision(recipe.config, sizes, device.type)
    recipe.check_measurements()
    check_uploads(recipe.config)
    recipe.check_sections()
    recipe.config = pin_base(recipe.config, recorded=commits_of_run(recipe.config))
    recipe.build()
    recipe.build_weight_average()


def _checkpoint_bytes(recipe: Any, assets: Mapping[str, Assets]) -> int:
    """Expected bytes of one checkpoint of this run."""
    rank = RankParts(recipe)
    # setup() does this in a run. discover() below has to find it.
    recipe.rng = StatefulRNG(recipe.config.seed, recipe.layout.random_stream, rank.sizes.grid)
    check_export(recipe.config, assets)
    return forecast_bytes(
        classify(discover(recipe)),
        world_size=rank.sizes.world,
        save_optimizer=recipe.config.checkpoint.save_optimizer,
        side_bytes=sum(each.nbytes for each in assets.values()),
    )
