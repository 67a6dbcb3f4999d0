"""Settings with which a run fits into the memory of its device, in the order of what they cost."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes, share_out
from automodel_ckpt.parallel.precision import resolve_precision

_USABLE = 0.97
"""The share of a device's memory that a forecast may reach."""
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """Other settings of a recipe, as *overrides* for the command line, and what they make of it."""

    overrides: tuple[str, ...]
    config: RecipeConfig
    sizes: Sizes
    recomputes: bool
    """Whether layers recompute their activations, and did not in the recipe."""

    def applied_to(self, recipe: Any) -> Any:
        """A copy of a dry run's *recipe* with these settings, which shares its model."""
        device = recipe.layout.device
        changed = copy.copy(recipe)
        changed.config = resolve_precision(self.config, self.sizes, device.type)
        changed.layout = RankLayout(0, self.sizes, 0, device, None)  # type: ignore[arg-type]
        return changed


def fits(total_bytes: int, device_bytes: int) -> bool:
    """Whether a forecast of *total_bytes* fits into a device."""
    return total_bytes <= _USABLE * device_bytes


def smaller(config: RecipeConfig, model: Any, sizes: Sizes) -> Iterator[Candidate]:
    """Yield settings of a recipe for *model* that need less memory: first those that cost the least time."""
    choices = _checkpointing_choices(config, model)
    for choice in choices:
        for candidate in _local_batches(config, sizes, choice, sizes):
            # Without overrides, it is the recipe itself.
            if candidate.overrides:
                yield candidate
    replicates = config.distributed.strategy == "ddp"
    if replicates and sizes.world > 1:
        for choice in choices:
            yield from map(_sharded, _local_batches(config, sizes, choice, sizes))
    num_ranks = 2 * sizes.world
    most = sizes
    while num_ranks <= max(_MOST_RANKS, sizes.world):
        more = _sizes_of(config, num_ranks)
        if more is not None and config.distributed.strategy != "single":
            most = more
            for choice in choices:
                for candidate in _local_batches(config, more, choice, sizes):
                    yield _sharded(candidate) if replicates else candidate
        num_ranks *= 2
    for ranks in dict.fromkeys((sizes, most)):
        yield from offloaded(config, model, ranks, before=sizes)


def offloaded(
    config: RecipeConfig, model: Any, sizes: Sizes, *, before: Sizes
) -> Iterator[Candidate]:
    """Yield settings with parameters, gradients and optimizer state in the memory of the host.

    *before* is the mesh of the recipe.
    """
    if config.distributed.cpu_offload:
        return
    for candidate in _local_batches(
        config, sizes, _checkpointing_choices(config, model)[-1], before
    ):
        yield _offloaded(candidate)


def missing_bytes(total_bytes: int, device_bytes: int) -> int:
    """How much more memory a forecast of *total_bytes* needs than a device has, with the share that stays free."""
    return math.ceil(total_bytes - _USABLE * device_bytes)


def is_checkpointed(config: RecipeConfig) -> bool:
    """Whether the layers of the model compute their activations again in the backward pass."""
    return isinstance(config.model, ModelConfig) and bool(config.model.activation_checkpointing)


def _checkpointing_choices(config: RecipeConfig, model: Any) -> list[bool]:
    """Whether layers compute their activations again: what the recipe says, and then whether they could."""
    checkpointed = is_checkpointed(config)
    can_checkpoint = isinstance(config.model, ModelConfig) and bool(
        getattr(model, "supports_gradient_checkpointing", False)
    )
    return [checkpointed, True] if can_checkpoint and not checkpointed else [checkpointed]


def _local_batches(
    config: RecipeConfig, sizes: Sizes, checkpointed: bool, before: Sizes
) -> Iterator[Candidate]:
    """Yield the settings with the recipe's local batch size, half of it, and so on down to 1.

    *before* is the mesh of the recipe.
    """
    local_batch_size = config.step_scheduler.local_batch_size
    while local_batch_size >= 1:
        candidate = _with_local_batch(config, local_batch_size, sizes, checkpointed, before)
        if candidate is not None:
            yield candidate
        local_batch_size //= 2


def _with_local_batch(
    config: RecipeConfig, local_batch_size: int, sizes: Sizes, checkpointed: bool, before: Sizes
) -> Candidate | None:
    """The candidate with these values; None if it is not possible with the recipe's global batch size."""
    steps, model = config.step_scheduler, config.model
    if steps.global_batch_size % (local_batch_size * sizes.dp):
        return None
    overrides: list[str] = []
    recomputes = checkpointed and not is_checkpointed(config)
    if local_batch_size != steps.local_batch_size:
        overrides.append(f"--step_scheduler.local_batch_size={local_batch_size}")
        config = replace(config, step_scheduler=replace(steps, local_batch_size=local_batch_size))
    if recomputes:
        assert isinstance(model, ModelConfig)
        overrides.append("--model.activation_checkpointing=true")
        config = replace(config, model=replace(model, activation_checkpointing=True))
    if sizes.world != before.world:
        overrides.append(f"--nproc-per-node={sizes.world}")
    return Candidate(tuple(overrides), config, sizes, recomputes)


def _sizes_of(config: RecipeConfig, num_ranks: int) -> Sizes | None:
    """The mesh of *num_ranks* ranks; None if the recipe's sizes do not fit it."""
    section = config.distributed
    try:
        return share_out(num_ranks, **section.mesh_sizes)
    except RecipeError:
        return None


def _sharded(candidate: Candidate) -> Candidate:
    """The candidate with parameters, gradients and optimizer state divided among its ranks."""
    section = replace(candidate.config.distributed, strategy="fsdp2")
    config = replace(candidate.config, distributed=section)
    words = (*candidate.overrides, "--distributed.strategy=fsdp2")
    return replace(candidate, overrides=words, config=config)


def _offloaded(candidate: Candidate) -> Candidate:
    """The candidate with parameters, gradients and optimizer state in the memory of the host."""
    section = replace(candidate.config.distributed, cpu_offload=True, strategy="fsdp2")
    words = ("--distributed.strategy=fsdp2", "--distributed.cpu_offload=true")
    config = replace(candidate.config, distributed=section)
    return replace(candidate, overrides=(*candidate.overrides, *words), config=config)
