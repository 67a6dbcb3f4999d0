"""How a run saves its checkpoints: what the section ``checkpoint`` of its recipe opens, on disk and in memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.memory.directory import forget_memory
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import choose_strategy, require_replicas
from automodel_ckpt.training.saves.exports import check_without_shared_storage, model_layout

if TYPE_CHECKING:
    from automodel_ckpt.training.saves.memory_saves import MemorySaves
    from automodel_ckpt.training.watch.replica_check import ReplicaCheck


def open_checkpointer(
    config: RecipeConfig, layout: RankLayout, resources: ExitStack
) -> Checkpointer:
    """Create the checkpointer of a run and take the lease of its directory. Collective.

    *resources* gets what closes it. Raises :class:`RecipeError` on all ranks if the directory cannot be used.
    """
    checkpointer = Checkpointer(
        config.checkpoint.checkpoint_dir,
        layout,
        layout.gloo_group,
        _options(config),
        timeout_seconds=_timeout_seconds(config),
    )
    checkpointer.open()
    resources.callback(checkpointer.close)
    if checkpointer.is_distributed:
        check_without_shared_storage(config)
    return checkpointer


def open_memory(
    config: RecipeConfig, layout: RankLayout, checkpointer: Checkpointer, resources: ExitStack
) -> MemorySaves | None:
    """Create what saves to memory, by the section ``checkpoint.memory``; None without it. Collective.

    *checkpointer* is that of the run directory. *resources* gets what closes the result.
    """
    section = config.checkpoint.memory
    if section is None:
        forgetting = "removing the record of checkpoints in memory"
        checkpointer.call_on_rank0(forgetting, partial(forget_memory, checkpointer.directory))
        return None
    from automodel_ckpt.training.saves.memory_saves import MemorySaves

    memory = MemorySaves(
        section,
        _options(config),
        checkpointer,
        layout,
        layout.gloo_group,
        timeout_seconds=_timeout_seconds(config),
    )
    resources.callback(memory.close)
    return memory


def replica_check(
    config: RecipeConfig, layout: RankLayout, model: nn.Module
) -> ReplicaCheck | None:
    """Create what compares the replicas of *model* before each save; None without ``checkpoint.verify_replicas``.

    Raises :class:`RecipeError` if the strategy has no replicas.
    """
    if not config.checkpoint.verify_replicas:
        return None
    strategy = choose_strategy(config.distributed.strategy, layout.sizes)
    from automodel_ckpt.training.watch.replica_check import KEY, ReplicaCheck

    require_replicas(strategy, layout.sizes, KEY)
    return ReplicaCheck(model, layout, is_replicated=strategy == "ddp")


def _options(config: RecipeConfig) -> CheckpointConfig:
    """The section ``checkpoint`` with the layout of model files that null means for this recipe."""
    return replace(config.checkpoint, model_layout=model_layout(config))


def _timeout_seconds(config: RecipeConfig) -> float:
    return 60 * config.distributed.timeout_minutes
