"""How a run saves its checkpoints: what the section ``checkpoint`` of its recipe opens, on disk and in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import nn

from automodel_ckpt.base.store_url import public
from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.node_directories import not_without_storage
from automodel_ckpt.checkpoint.run.lock_file import remove_leftover_request
from automodel_ckpt.checkpoint.run.notes import forget_memory
from automodel_ckpt.checkpoint.saving.save import Assets
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.repository import base_directory, code_directory
from automodel_ckpt.models.meta_init import float32_kept
from automodel_ckpt.parallel.mesh_sizes import RankLayout, choose_strategy, require_replicas
from automodel_ckpt.parallel.ranks.agree import raise_on_all_ranks
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.parts.preprocessors import generation_file

if TYPE_CHECKING:
    from automodel_ckpt.training.saves.memory_saves import MemorySaves
    from automodel_ckpt.training.watch.replicas import ReplicaCheck

log = logging.getLogger("automodel_ckpt")


def model_layout(config: RecipeConfig) -> Literal["shards", "hf", "adapter"]:
    """``checkpoint.model_layout``; by default ``adapter`` for adapters in safetensors, otherwise ``shards``."""
    section = config.checkpoint
    if section.model_layout:
        return section.model_layout
    has_adapter_file = config.peft is not None and section.model_save_format == "safetensors"
    return "adapter" if has_adapter_file else "shards"


def export_assets(recipe: Any) -> dict[str, Assets]:
    """What an export of *recipe*'s module ``model`` needs besides its weights. Empty for a model by ``_target_``.

    Raises :class:`RecipeError` for what transformers could not write.
    """
    config: RecipeConfig = recipe.config
    trainable: Trainable = recipe.trainable
    further: Mapping[str, bytes] = recipe.export_files()
    section, peft = config.model, config.peft
    if isinstance(section, Target):
        return {}
    base = section.from_pretrained or (peft and peft.base_dir)
    base_dir = base_directory(base, section.revision) if base else None
    if recipe.stop_tokens:
        # The model has other end tokens than its base.
        further = {**generation_file(unwrap(trainable.model), base_dir), **further}
    if peft is not None:
        assert trainable.adapted is not None
        from automodel_ckpt.training.model.adapters import adapter_assets

        adapters = adapter_assets(
            trainable.model,
            trainable.adapted,
            section.from_pretrained or peft.base_dir or "",
            revision=section.revision,
            run=Path(config.checkpoint.checkpoint_dir),
            preprocessor=recipe.preprocessor,
            # The digest reads all bytes of the base, so only one rank computes it.
            reads_base=recipe.layout.is_rank0 and not recipe.is_dry_run,
            has_own_config=trainable.has_task_head,
            further=further,
        )
        return {"model": adapters}
    declared = (
        *section.allow_missing,
        *section.allow_unexpected,
        *trainable.resized,
        *trainable.other_head,
    )
    assets = HFAssets.from_model(
        trainable.model,
        tokenizer=recipe.preprocessor,
        base_dir=base_dir,
        code_dir=code_directory(unwrap(trainable.model), section.revision),
        declared=declared,
        further=further,
        float32_in=float32_kept(unwrap(trainable.model)),
    )
    # Now, not at the first export: transformers rejects an invalid generation config when it saves.
    assets.validate()
    return {"model": assets}


def check_export(config: RecipeConfig, assets: Mapping[str, Assets]) -> None:
    """Raise :class:`RecipeError` if the recipe wants exports or uploads and there are no *assets* to make them."""
    wanted = {
        "checkpoint.save_consolidated": config.checkpoint.save_consolidated,
        "checkpoint.export_best": config.checkpoint.export_best,
        "hub": config.hub is not None,
    }
    for key, value in wanted.items():
        if value and not assets:
            raise RecipeError(
                "there is nothing to export: only models of transformers have Hugging Face files",
                where=key,
                value=str(value).lower(),
                hint="remove the key; or give your recipe a build_assets method that describes the export",
            )


def check_without_shared_storage(config: RecipeConfig) -> None:
    """Check a recipe for nodes without shared storage: no node has all files of a checkpoint.

    Logs what is different by default. Raises :class:`RecipeError` for a key that needs all files on a node.
    """
    section = config.checkpoint
    unsupported: dict[str, Any] = {
        # hf is rejected by the checkpointer.
        "checkpoint.model_layout": section.model_layout == "adapter" and "adapter",
        "checkpoint.save_consolidated": section.save_consolidated,
        "checkpoint.export_best": section.export_best,
        "checkpoint.export_ema": section.export_ema,
        "checkpoint.average_last": section.average_last,
        "checkpoint.memory": section.memory is not None,
        "hub": config.hub is not None,
    }
    for key, value in unsupported.items():
        if value:
            raise not_without_storage(key, value)
    assert section.remote is not None, "the checkpoints are in a store"
    message = (
        "no Hugging Face files are exported: `ckpt pull %s DIRECTORY` downloads the newest checkpoint, "
        "and `ckpt export` makes them"
    )
    log.info(message, public(section.remote.url))
    if model_layout(config) == "adapter":
        log.info(
            "adapters are saved as shards, because ranks on several nodes cannot write one file"
        )


def check_uploads(config: RecipeConfig, group: dist.ProcessGroup | None = None) -> None:
    """Check the section ``hub`` on rank 0, without a request. Raises :class:`RecipeError` on all ranks."""
    section = config.hub
    with raise_on_all_ranks(group):
        if section is not None and (group is None or dist.get_rank(group) == 0):
            from automodel_ckpt.hub.background import check_hub

            check_hub(section)


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
        # The line about a published checkpoint is enough.
        is_quiet=True,
    )
    checkpointer.open()
    resources.callback(checkpointer.close)
    if checkpointer.is_rank0:
        remove_leftover_request(checkpointer.run.root)
    if checkpointer.nodes is not None:
        check_without_shared_storage(config)
    return checkpointer


def open_memory(
    config: RecipeConfig, layout: RankLayout, checkpointer: Checkpointer, resources: ExitStack
) -> MemorySaves | None:
    """Create what saves to memory, by the section ``checkpoint.memory``. Returns None without it. Collective.

    *checkpointer* writes to the run directory. *resources* gets what closes the result.
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
    """Create what compares the replicas of *model* before each save.

    Returns None without ``checkpoint.verify_replicas``. Raises :class:`RecipeError` if the strategy has no replicas.
    """
    if not config.checkpoint.verify_replicas:
        return None
    strategy = choose_strategy(config.distributed.strategy, layout.sizes)
    from automodel_ckpt.training.watch.replicas import KEY, ReplicaCheck

    require_replicas(strategy, layout.sizes, KEY)
    return ReplicaCheck(model, layout, is_replicated=strategy == "ddp")


def _options(config: RecipeConfig) -> CheckpointConfig:
    """The section ``checkpoint`` with the layout of model files that null means for this recipe."""
    return replace(config.checkpoint, model_layout=model_layout(config))


def _timeout_seconds(config: RecipeConfig) -> float:
    return 60 * config.distributed.timeout_minutes
