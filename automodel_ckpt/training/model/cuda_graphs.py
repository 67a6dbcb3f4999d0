"""CUDA graphs of compiled layers: when a recipe may use them, and when they may reuse the memory of their outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.layers.compiling import uses_cuda_graphs
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.training.model.sections import balancing_scope, num_micro_batches


def has_cuda_graphs(config: RecipeConfig, layout: RankLayout) -> bool:
    """Whether layers run as CUDA graphs, by the section ``compile``."""
    section = config.compile
    return section.enabled and uses_cuda_graphs(section.mode, layout.device.type)


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


def marking_steps(
    compute: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], AbstractContextManager[Any]]:
    """The context *compute* of a forward pass, before which CUDA graphs may reuse the memory of earlier outputs."""

    def marked() -> AbstractContextManager[Any]:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return compute()

    return marked
