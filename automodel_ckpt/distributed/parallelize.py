"""From one model to the ranks' share of it: cut within layers (tensor parallel), sharded (fsdp2), copied (ddp)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.distributed.mesh import RankLayout, build_mesh, data_mesh
from automodel_ckpt.distributed.mesh_sizes import choose_strategy
from automodel_ckpt.distributed.tensor_parallel import Plan, apply_plan, plan_for
from automodel_ckpt.errors import RecipeError

Materialise = Callable[[nn.Module, torch.device], None]
"""Gives a model that was built without memory this rank's share of its values, on a device."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """What the recipe says beside the sizes; ``compute_dtype`` None computes in the parameters' own."""

    strategy: str = "auto"
    reshard_after_forward: bool = True
    compute_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    sequence_parallel: bool = False
    tp_plan: Plan | None = None


def check_parallelism(how: Parallelism, layout: RankLayout) -> None:
    """:class:`RecipeError` for what these ranks and this machine cannot do, before anything is loaded."""
    strategy = choose_strategy(how.strategy, layout.sizes)
    if how.cpu_offload and strategy != "fsdp2":
        raise RecipeError(
            "only fsdp2 supports CPU offload",
            where="distributed.cpu_offload",
            value=f"strategy {strategy}",
            hint="set distributed.strategy to fsdp2, or remove cpu_offload",
        )
    if how.cpu_offload and layout.device.type != "cuda":
        raise RecipeError(
            "there is no GPU memory to offload from: FSDP2's CPUOffloadPolicy needs an accelerator",
            where="distributed.cpu_offload",
            value=f"device {layout.device}",
            hint="remove cpu_offload when training on the CPU",
        )


def parallelize(
    model: nn.Module,
    layout: RankLayout,
    how: Parallelism,
    materialise: Materialise | None = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """This rank's share of the model on its device: cut and sharded in place, or wrapped (ddp).

    Parameters may be on the meta device, without memory: *materialise* then fills what is left of them here. Of those
    that have values every rank must bring the same. fsdp2 makes a group of each decoder layer and one of the rest,
    where tied parameters stay together, and gathers them in the compute dtype; without it :func:`compute_context` is
    needed. *mesh* is :func:`build_mesh`'s where the caller has it already. Raises :class:`RecipeError` for what this
    model cannot do.
    """
    strategy = choose_strategy(how.strategy, layout.sizes)
    if mesh is None and (strategy == "fsdp2" or layout.sizes.tp > 1):
        mesh = build_mesh(layout)
    if mesh is not None and layout.sizes.tp > 1:
        plan = plan_for(model, how.tp_plan, layout.sizes.tp)
        apply_plan(model, plan, mesh["tp"], sequence_parallel=how.sequence_parallel)
    if mesh is not None and strategy == "fsdp2":
        _shard(model, data_mesh(mesh), how)
    device = torch.device("cpu") if how.cpu_offload else layout.device
    if materialise is not None:
        materialise(model, device)
    model = model.to(device)
    if how.cpu_offload:
        _move_buffers(model, layout.device)  # fsdp2 moves parameters to and fro, and nothing else
    # DDP only reduces gradients, and raises for a model without any (a frozen reference model).
    if strategy == "ddp" and _is_trained(model):
        device_ids = [layout.device] if layout.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    return model


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _shard(model: nn.Module, mesh: DeviceMesh, how: Parallelism) -> None:
    dtype = how.compute_dtype
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy() if how.cpu_offload else OffloadPolicy(),
    }
    for layer in untied_layers(model):
        fully_shard(layer, reshard_after_forward=how.reshard_after_forward, **options)
    # The backward pass needs the root first: gathering it twice would only cost. A frozen model has no backward pass.
    fully_shard(model, reshard_after_forward=not _is_trained(model), **options)


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


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


def untied_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that share no parameter with what is outside: sharded on its own, one would lose it."""

    def held(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))

    everywhere = held(model)
    return [
        layer
        for layer in decoder_layers(model)
        if all(everywhere[p] == n for p, n in held(layer).items())
    ]


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Whether the forward and backward inside reduce gradients over the ranks: only an accumulation's last does."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        return _no_sync(model)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    return nullcontext()


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward left gathered (fsdp2)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _no_sync(model: DistributedDataParallel) -> Iterator[None]:
    with model.no_sync():
        yield


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    limit: float | None,
    *,
    in_step: Callable[[float], None] | None = None,
    in_stages: bool = False,
    counted_elsewhere: frozenset[int] = frozenset(),
) -> float:
    """The 2-norm of all gradients together; they are scaled down to *limit* where it is larger. A collective.

    With *in_step* it is left to the optimizer's step to divide those on the CPU by the number given to it.

    Plain gradients count as the same on all ranks; but where all are plain and *in_stages*, as each rank's own, except
    for those of parameters with the ids *counted_elsewhere*. Parameters may be of several modules on several meshes,
    which no single operation takes.
    """
    parameters = list(parameters)
    local = counted = [
        gradient for parameter in parameters if (gradient := parameter.grad) is not None
    ]
    sharded = any(isinstance(gradient, DTensor) for gradient in local)
    if sharded or counted_elsewhere:
        with torch.no_grad():  # else to_local would record each of its calls
            local, counted = _parts_here(parameters, sharded, counted_elsewhere)
    device = local[0].device if local else torch.device("cpu")
    here = _norm_here(counted, device)
    if sharded or in_stages:
        total = torch.as_tensor(here, dtype=torch.float64, device=device).square()
        dist.all_reduce(total)
        norm = math.sqrt(total.item())
    else:
        norm = float(here)
    if limit is not None and norm > limit:
        if in_step is not None and device.type == "cpu":
            in_step((norm + 1e-6) / limit)
        else:
            torch._foreach_mul_(local, limit / (norm + 1e-6))
    return norm


def _parts_here(
    parameters: list[nn.Parameter], sharded: bool, counted_elsewhere: frozenset[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's parts of all gradients, and those among them that it counts."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in trained:
        complete_gradient(parameter)
    gradients = [p.grad for p in trained if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    here = [id(parameter) not in counted_elsewhere for parameter in trained]
    return local, [
        part
        for part, g, mine in zip(local, gradients, here, strict=True)
        if mine and _counts(g, sharded)
    ]


def _norm_here(gradients: list[torch.Tensor], device: torch.device) -> float | torch.Tensor:
    """Their 2-norm; off the CPU a 0-dim tensor, not waited for."""
    if (
        device.type == "cpu" or not gradients
    ):  # one by one takes half as long as _foreach_norm and its stack
        return math.hypot(*[torch.linalg.vector_norm(gradient).item() for gradient in gradients])
    norms = torch._foreach_norm(gradients)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
    return total


def complete_gradient(parameter: nn.Parameter) -> None:
    """A gradient that is still to be summed over ranks (hand-written plans may leave it so) takes the parameter's
    layout."""
    gradient = parameter.grad
    if (
        isinstance(gradient, DTensor)
        and isinstance(parameter, DTensor)
        and gradient.placements != parameter.placements
    ):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _counts(gradient: torch.Tensor, sharded: bool) -> bool:
    """Whether this rank's part goes into the sum over all ranks: of ranks that hold the same, the first counts."""
    if not isinstance(gradient, DTensor):
        return not sharded or dist.get_rank() == 0
    place = gradient.device_mesh.get_coordinate() or ()
    return all(
        index == 0 for index, p in zip(place, gradient.placements, strict=True) if p.is_replicate()
    )
