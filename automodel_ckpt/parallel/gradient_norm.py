"""The norm of the gradients of a model that is divided among ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    limit: float | None,
    *,
    on_device: bool = False,
    in_step: Callable[[Any], None] | None = None,
    in_stages: bool = False,
    counted_elsewhere: frozenset[int] = frozenset(),
) -> Any:
    """Compute the 2-norm of all gradients together, and scale them down to *limit* if the norm is larger. Collective.

    Returns the norm as a number. If *in_step* is given and the gradients are on the CPU, they are not scaled here:
    *in_step* is called with the number by which the optimizer's step must divide them.

    With *on_device*, it does not wait for the norm, and returns a 0-dim float64 tensor. If *in_step* is given, it is
    called in every step with a tensor: 1 where the norm is not larger than *limit*. Otherwise, the gradients are
    multiplied in every step.

    Plain gradients count as equal on all ranks. If all are plain and *in_stages* is true, they count as different on
    each rank, except for parameters with ids in *counted_elsewhere*. Parameters may belong to several modules on
    several meshes, which no single operation of torch accepts.
    """
    local, total = _norm(list(parameters), in_stages, counted_elsewhere, on_device=on_device)
    if on_device:
        device = local[0].device if local else None
        norm = torch.as_tensor(total, dtype=torch.float64, device=device)
        if limit is not None and local:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that results equal torch's.
            if in_step is not None:
                in_step(torch.where(norm > limit, (norm + 1e-6) / limit, 1.0))
            else:
                # float32 as the arithmetic of the kernel; torch converts it to the type of each gradient.
                factor = torch.where(norm > limit, limit / (norm + 1e-6), 1.0).float()
                torch._foreach_mul_(local, factor)
        return norm
    number = float(total)
    # NaN compares false and infinity does not: the training loop drops the gradients of any norm that is not finite.
    if limit is not None and number > limit:
        if in_step is not None and local[0].is_cpu:
            in_step((number + 1e-6) / limit)
        else:
            torch._foreach_mul_(local, limit / (number + 1e-6))
    return number


def complete_gradient(parameter: nn.Parameter) -> None:
    """Redistribute a gradient to the parameter's placements; hand-written plans may leave it as partial sums."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _norm(
    parameters: list[nn.Parameter],
    in_stages: bool,
    counted_elsewhere: frozenset[int],
    *,
    on_device: bool = False,
) -> tuple[list[Tensor], float | Tensor]:
    """This rank's gradients, and the 2-norm of the gradients of all ranks. Collective.

    The norm is a number or a tensor; with *on_device* a tensor, unless there are no gradients.
    """
    gradients = (parameter.grad for parameter in parameters)
    local = counted = [gradient for gradient in gradients if gradient is not None]
    sharded = any(isinstance(gradient, DTensor) for gradient in local)
    if sharded or counted_elsewhere:
        with torch.no_grad():  # otherwise autograd would record each to_local
            local, counted = _parts_here(parameters, sharded, counted_elsewhere)
    device = local[0].device if local else torch.device("cpu")
    here = _norm_here(counted, device, on_device=on_device)
    if not sharded and not in_stages:
        return local, here
    total = torch.as_tensor(here, dtype=torch.float64, device=device).square()
    # Over all ranks of the run: _counts and counted_elsewhere make each element count on one rank
    # only.
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    if on_device:
        return local, total.sqrt()
    return local, math.sqrt(total.item())


def _parts_here(
    parameters: list[nn.Parameter], sharded: bool, counted_elsewhere: frozenset[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's shards of all gradients, and those among them that this rank counts in the norm."""
    local, counted = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        complete_gradient(parameter)
        gradient = parameter.grad
        shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.append(shard)
        if id(parameter) not in counted_elsewhere and _counts(gradient, sharded):
            counted.append(shard)
    return local, counted


def _norm_here(gradients: list[Tensor], device: torch.device, *, on_device: bool) -> float | Tensor:
    """The 2-norm of *gradients*: a number on the CPU; elsewhere, or with *on_device*, a 0-dim tensor, without
    synchronization."""
    is_number = device.type == "cpu" and not on_device
    if is_number or not gradients:
        # One by one takes half as long as torch's foreach operation with its stack.
        return math.hypot(*[torch.linalg.vector_norm(gradient).item() for gradient in gradients])
    norms = torch._foreach_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)  # type: ignore[no-any-return]


def _counts(gradient: Tensor, sharded: bool) -> bool:
    """Whether the sum over all ranks includes this rank's shard: among ranks with equal shards, only the first."""
    if not isinstance(gradient, DTensor):
        return not sharded or dist.get_rank() == 0
    coordinate = gradient.device_mesh.get_coordinate() or ()
    for index, placement in zip(coordinate, gradient.placements, strict=True):
        if placement.is_replicate() and index > 0:
            return False
    return True
