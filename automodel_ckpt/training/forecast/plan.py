"""The steps, the memory and the size of checkpoints that a recipe would need, without allocating its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.saving.forecast import forecast_bytes
from automodel_ckpt.checkpoint.saving.save import Assets
from automodel_ckpt.checkpoint.state.model_config import CONFIG
from automodel_ckpt.parallel.mesh import RankLayout, device_type
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.parallel.precision import resolve_precision
from automodel_ckpt.training.counters.cadence import planned_end
from automodel_ckpt.training.forecast.advice import Advice, advice_for
from automodel_ckpt.training.forecast.memory import Memory, estimate_memory
from automodel_ckpt.training.forecast.micro_batch import MicroBatchShape, micro_batch_shape
from automodel_ckpt.training.forecast.model_traces import Traces
from automodel_ckpt.training.forecast.rank_parts import RankParts
from automodel_ckpt.training.measure.validation_metrics import steps_per_epoch
from automodel_ckpt.training.recipe_parts import RecipeParts
from automodel_ckpt.training.saves.checkpointing import check_export, check_uploads
from automodel_ckpt.training.start.base_commit import commits_of_run, pin_base
from automodel_ckpt.training.start.start_rank import check_classes


@dataclass(frozen=True, slots=True)
class ForecastDevice:
    """The device that a forecast is for: its *type*, ``cuda`` or ``cpu``, and its memory. None means not limited."""

    type: str
    nbytes: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
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
        end=planned_end(recipe.step_scheduler.cadence, steps_of_epoch),
        device=device,
        advice=advice_for(recipe, given, device.nbytes, memory, traces),
    )


def _build_without_weights(recipe: Any, sizes: Sizes, device: ForecastDevice) -> None:
    """Do what :meth:`Recipe.setup` does before the resume, with a model on the meta device."""
    recipe.is_dry_run = True
    # No process group: collectives return this rank's own values.
    # Nothing is allocated on the device, but it decides about data types.
    recipe.layout = RankLayout(0, sizes, 0, torch.device(device.type), None)  # type: ignore[arg-type]
    check_classes(recipe, RecipeParts)
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
        num_shards=rank.sizes.tp * rank.num_shards,
    )
