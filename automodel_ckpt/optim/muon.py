"""Muon for sharded matrices: each rank orthogonalizes complete matrices, so that the update equals one rank's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.optim.combined_optimizer import update_each


class Muon(torch.optim.Muon):
    """torch.optim.Muon with updates that do not depend on how matrices are sharded.

    With torch's class, the products of the Newton-Schulz iteration are computed of shards and rounded to bfloat16
    before they are added up, so that a run on two ranks differs from one on a single rank by about 1e-3. Here, the
    update of a sharded matrix is gathered first, and each rank applies its shard of the result. Momentum remains
    sharded. Step is a collective of the ranks that share a matrix.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all matrices that have gradients. Returns the result of *closure*, which computes the gradients."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        if not any(isinstance(each, DTensor) for each in parameters):
            return super().step(closure)  # type: ignore[no-any-return, no-untyped-call]
        return update_each(self, closure, self._update)

    def _update(self, parameter: Tensor, group: ValueDict) -> None:
        """Make a step of one matrix. Source of the formulas: the documentation of torch.optim.Muon."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        direction = average
        if group["nesterov"]:
            direction = gradient.lerp(average, group["momentum"])
        if isinstance(direction, DTensor):
            step = _shard_like(orthogonalized(direction.full_tensor(), group), direction)
        else:
            step = orthogonalized(direction, group)
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(step, alpha=-rate * _rate_factor(group["adjust_lr_fn"], parameter.shape))


def orthogonalized(matrix: Tensor, group: ValueDict) -> Tensor:
    """Return *matrix* with singular values of about 1, in bfloat16, as torch.optim.Muon with the options of *group*.

    Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024: the quintic Newton-Schulz
    iteration X <- a X + b (X X^T) X + c (X X^T)^2 X, of X with at most as many rows as columns and a norm of at most 1.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        square = x @ x.T
        # addmm rounds to bfloat16 once, as torch's own class does.
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def _rate_factor(adjust: str | None, shape: torch.Size) -> float:
    """The factor of the learning rate for a matrix of *shape*, by the option ``adjust_lr_fn`` of torch.optim.Muon."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _shard_like(whole: Tensor, sharded: DTensor) -> Tensor:
    """Return *whole*, which all ranks have, with the layout of *sharded*. Communicates nothing."""
    mesh = sharded.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=sharded.placements)
