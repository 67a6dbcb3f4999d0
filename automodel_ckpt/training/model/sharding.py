"""From an unsharded model to this rank's shards, or to its stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.float32_parts import constants_in, float32_names
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import choose_strategy
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.parallel.parallelize import compute_context, parallelize
from automodel_ckpt.training.model.deferred_model import DeferredModel
from automodel_ckpt.training.model.sections import (
    ModelRequest,
    balancing_scope,
    num_micro_batches,
    parallelism,
)

if TYPE_CHECKING:
    from automodel_ckpt.training.model.pipeline import PipelineStage


@dataclass(frozen=True)
class Sharded:
    """A model with this rank's values, the context of its forward pass, and its pipeline stage if it has one."""

    model: nn.Module
    compute: Callable[[], AbstractContextManager[Any]]
    stage: PipelineStage | None = None


def check_mesh(request: ModelRequest, model: nn.Module) -> None:
    """Raise :class:`RecipeError` if *model* cannot be divided over the dimensions of the device mesh."""
    layout = request.layout
    if layout.in_stages:
        if request.has_task_head:
            raise RecipeError(
                "a model with a classification head cannot be divided into pipeline stages",
                where="distributed.pp_size",
                value=layout.sizes.pp,
                hint="remove pp_size: fsdp2 shards the model over the same ranks",
            )
        from automodel_ckpt.models.pipeline_stage import check_stages

        check_stages(model, layout.sizes.pp)
    if layout.sizes.cp > 1:
        from automodel_ckpt.parallel.context_parallel import check_context_parallel

        check_context_parallel(model)
    if layout.sizes.ep > 1:
        from automodel_ckpt.parallel.expert_parallel import check_experts

        check_experts(model, layout)


def shard_for_training(request: ModelRequest, deferred: DeferredModel) -> Sharded:
    """Shard a model for training. Its forward pass uses CUDA graphs as the recipe states."""
    sharded = shard(deferred, request.config, request.layout)
    if not has_cuda_graphs(request.config, request.layout):
        return sharded

    def compute() -> AbstractContextManager[Any]:
        # From here on, CUDA graphs may reuse the memory of earlier outputs.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return sharded.compute()

    return replace(sharded, compute=compute)


def shard(deferred: DeferredModel, config: RecipeConfig, layout: RankLayout) -> Sharded:
    """Leave this rank's shards of a model in place, with their values, as the section ``distributed`` asks.

    Decoder layers are compiled before, as ``compile`` asks. A collective. Raises :class:`RecipeError` for what this
    model does not support.
    """
    model, section = deferred.model, config.distributed
    plan = build(section.tp_plan, model=model) if section.tp_plan is not None else None
    how = replace(parallelism(section), tp_plan=plan)
    strategy = choose_strategy(how.strategy, layout.sizes)
    if strategy == "fsdp2":
        how = replace(how, float32_names=float32_names(model, how.compute_dtype))
        how = replace(how, constants=constants_in(model, how.compute_dtype))
    compute = compute_context(strategy, layout.device, how.compute_dtype)
    stages = None
    if layout.in_stages:
        from automodel_ckpt.training.model.pipeline import split_stages

        # Under autocast, residual additions keep the hidden states in the weights' dtype.
        hidden_dtype = how.compute_dtype if strategy == "fsdp2" else None
        stages = split_stages(model, layout, plan, hidden_dtype)
        how = replace(how, tp_plan=stages.tp_plan)
    if config.compile.enabled:
        # Layer by layer and in place: torch.compile(model) would add `_orig_mod.` to all names.
        from automodel_ckpt.models.layers.compiling import compile_layers, num_row_widths

        settings = config.compile
        num_widths = num_row_widths(settings.row_widths, settings.dynamic, layout.device.type)
        compile_layers(
            decoder_layers(model),
            backend=settings.backend,
            mode=settings.mode,
            fullgraph=settings.fullgraph,
            dynamic=settings.dynamic,
            device=layout.device,
            num_widths=num_widths,
        )
    mesh = stages.mesh if stages is not None else None
    sharded = parallelize(model, layout, how, deferred.materialise, mesh)
    if stages is None:
        return Sharded(sharded, compute)
    from automodel_ckpt.training.model.pipeline import PipelineStage, log_idle_share

    stage = PipelineStage(sharded, layout, stages, section.pp_schedule)
    log_idle_share(num_micro_batches(config, layout.dp_size), layout)
    return Sharded(sharded, compute, stage)


def has_cuda_graphs(config: RecipeConfig, layout: RankLayout) -> bool:
    """Whether layers run as CUDA graphs, by the section ``compile``."""
    if not config.compile.enabled:
        return False
    from automodel_ckpt.models.layers.compiling import uses_cuda_graphs

    return uses_cuda_graphs(config.compile.mode, layout.device.type)


def check_cuda_graphs(
    config: RecipeConfig, layout: RankLayout, *, has_routers: bool = False
) -> None:
    """Validate that CUDA graphs may overwrite outputs of an earlier forward pass. Raises :class:`RecipeError`.

    *has_routers*: whether the loss of a mixture of experts is added.
    """
    accumulates = num_micro_batches(config, layout.dp_size) > 1
    scope = balancing_scope(config.model)
    if layout.in_stages:
        reason = "several micro-batches are in progress on a pipeline stage"
    elif accumulates and config.distributed.defer_gradient_sync:
        reason = "deferred gradients of several micro-batches are kept"
    elif accumulates and has_routers and scope == "global_batch":
        reason = "the routers' choices of several micro-batches are kept (model.router_aux_loss)"
    else:
        return
    raise RecipeError(
        f"this mode uses CUDA graphs, which overwrite their outputs, and {reason}",
        where="compile.mode",
        value=config.compile.mode,
        hint="remove compile.mode, or set it to max-autotune-no-cudagraphs",
    )
