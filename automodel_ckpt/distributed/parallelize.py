"""From one model to the ranks' share of it: fsdp2, ddp or single."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.errors import RecipeError


def choose_strategy(strategy: str, world_size: int) -> str:
    """``fsdp2``, ``ddp`` or ``single``. Raises :class:`RecipeError` for ``single`` on several ranks."""
    if strategy == "auto":
        return "single" if world_size == 1 else "fsdp2"
    if strategy == "single" and world_size > 1:
        raise RecipeError(
            "strategy single trains on one rank",
            where="distributed.strategy",
            value=f"single, with {world_size} ranks",
            remedy="set it to auto, fsdp2 or ddp, or start one process",
        )
    return strategy


def parallelize(
    model: nn.Module,
    layout: RankLayout,
    *,
    strategy: str = "auto",
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model on its device, sharded in place (fsdp2), wrapped (ddp) or as it is (single).

    Every rank must bring the same weights. fsdp2 makes a group of each decoder layer and one of the rest, where tied
    parameters stay together, and gathers them in *compute_dtype*; the others need :func:`compute_context` for it.
    """
    strategy = choose_strategy(strategy, layout.world_size)
    model = model.to(layout.device)
    if strategy == "single":
        return model
    if strategy == "ddp":
        device_ids = [layout.device] if layout.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    mesh = init_device_mesh(layout.device.type, (layout.dp_size,), mesh_dim_names=("dp",))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    # The root is needed again at once by the backward pass: gathering it twice would only cost.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    return model


def compute_context(
    strategy: str, device: torch.device, compute_dtype: torch.dtype | None
) -> Callable[[], AbstractContextManager[object]]:
    """What a forward pass runs in to compute in *compute_dtype*: autocast, unless fsdp2 gathers in that type."""
    if compute_dtype is None or strategy == "fsdp2":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=compute_dtype)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, never one inside another.

    Modules of the classes in ``_no_split_modules``, or else the elements of the longest ModuleList.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers = max(lists, key=len, default=[])
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Whether the forward and backward inside reduce gradients over the ranks: only an accumulation's last does."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        return _no_sync(model)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    return nullcontext()


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward left gathered (fsdp2)."""
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def _no_sync(model: DistributedDataParallel) -> Iterator[None]:
    with model.no_sync():
        yield


def full_value(value: torch.Tensor) -> float:
    """A 0-dim tensor, sharded or not, as a Python number; a collective where it is a DTensor."""
    full_tensor = getattr(value, "full_tensor", None)
    return float((full_tensor() if full_tensor is not None else value).item())
