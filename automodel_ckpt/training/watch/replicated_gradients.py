"""Detection of incomplete tensor parallel plans: replicated parameters must get equal gradients.

A parameter that is replicated over a tensor parallel group is updated by each rank on its own. If its module sees only
a rank's heads or columns, and the plan does not sum its gradient over the ranks, the copies diverge without an error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.gradient_norm import complete_gradient
from automodel_ckpt.parallel.precision import compute_dtype
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.training.watch.batch_errors import in_all_layers

_MAX_STEPS = 10
_NUM_SUMS = 8
_NEGLIGIBLE = 1e-6
"""A gradient with a norm below this part of the largest one may be rounding only, which differs between ranks."""
_MAX_NAMED = 5


class ReplicatedGradients:
    """Compares the gradients of the trained parameters that are replicated over the ranks of a tensor parallel group.

    Each parameter is compared in the first step in which its gradient is not zero (lora_A has none before lora_B is
    updated), but only in the first steps of a process: the comparison waits for the device.
    """

    def __init__(self, model: nn.Module, config: RecipeConfig) -> None:
        self._pending: dict[str, nn.Parameter] = {}
        for name, parameter in unwrap(model).named_parameters():
            if parameter.requires_grad and _is_replicated(parameter):
                self._pending[name] = parameter
        self._tolerance = _tolerance(model, config)
        self._num_steps_left = _MAX_STEPS

    def check(self, group: dist.ProcessGroup | None) -> None:
        """Compare the gradients of this step, before they are clipped. Collective over *group*, the ranks of the run.

        Raises :class:`RecipeError` on all ranks if some differ.
        """
        if self._num_steps_left == 0:
            return
        self._num_steps_left -= 1
        # Pipeline stages have other parameters: one may be done before another.
        if all(agree.gather_or_raise(group, self._is_done_after_comparison)):
            self._num_steps_left = 0

    def _is_done_after_comparison(self) -> bool:
        """Compare the gradients within this rank's group. Returns whether each parameter has been compared."""
        if not self._pending:
            return True
        found = self._compare()
        for name in found:
            del self._pending[name]
        differing = {name: part for name, part in found.items() if part > self._tolerance}
        if differing:
            raise _error(differing)
        return not self._pending

    def _compare(self) -> dict[str, float]:
        """The largest difference of each gradient between ranks as a part of its norm, without negligible gradients."""
        rows = []
        for parameter in self._pending.values():
            complete_gradient(parameter)
            rows.append(_summary(parameter))
        first = next(iter(self._pending.values()))
        assert isinstance(first, DTensor)
        # A maximum may lose NaN. Without values for infinities, nan_to_num would make them finite.
        here = torch.stack(rows).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        # With CPU offload, gradients are on the CPU, but the group is the GPUs'.
        here = here.to(first.device_mesh.device_type)
        # One collective for the largest and the smallest values.
        extremes = torch.cat([here, -here])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=first.device_mesh.get_group("tp"))
        # A step with gradients that are not finite changes no weight.
        if not torch.isfinite(extremes).all():
            return {}
        largest, negated_smallest = extremes.cpu().chunk(2)
        differences = (largest + negated_smallest).amax(dim=1).tolist()
        norms = largest[:, 0].tolist()
        negligible = _NEGLIGIBLE * max(norms)
        found = {}
        for name, difference, norm in zip(self._pending, differences, norms, strict=True):
            if norm > negligible:
                found[name] = difference / norm
        return found


def _tolerance(model: nn.Module, config: RecipeConfig) -> float:
    """The difference between gradients, as a part of their norm, that rounding in the run's data types can explain.

    The values are far above the differences between kernels that add in varying order, and far below the differences
    between ranks that see other heads or columns.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    compute_type = compute_dtype(config.distributed)
    if compute_type is not None:
        dtypes.add(compute_type)
    is_16_bit = any(dtype.itemsize < 4 for dtype in dtypes)
    return 0.1 if is_16_bit else 1e-3


def _is_replicated(parameter: nn.Parameter) -> bool:
    """Whether all ranks of a tensor parallel group have a copy of this parameter, or of the same shard of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    if "tp" not in names:
        return False
    return parameter.placements[names.index("tp")].is_replicate()


def _summary(parameter: nn.Parameter) -> torch.Tensor:
    """[norm, sums of every eighth element] of this rank's part of the gradient: float64 of length 9, on its device.

    If two gradients differ by a random vector, each sum differs by a third of the vector's norm on average. Unlike
    projections on random vectors, sums need no memory.
    """
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if local is None:
        local = torch.zeros(0, device=parameter.device)
    flat = local.detach().reshape(-1)
    num_even = flat.numel() // _NUM_SUMS * _NUM_SUMS
    sums = flat[:num_even].view(-1, _NUM_SUMS).sum(dim=0, dtype=torch.float32).double()
    rest = flat[num_even:].double()
    sums[: rest.numel()] += rest
    norm = torch.linalg.vector_norm(flat, dtype=torch.float32).double()
    return torch.cat([norm[None], sums])


def _error(differing: Mapping[str, float]) -> RecipeError:
    """The error for parameters with gradients that differ by these parts of their norms."""
    names: dict[str, None] = {}
    # The backward pass starts at the loss: the last modules are the closest to the cause.
    for name in reversed([*differing]):
        names[in_all_layers(name)] = None
    shown = ", ".join([*names][:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return RecipeError(
        "the tensor parallel plan is incomplete: the copies of replicated parameters get different gradients on the "
        "ranks of a group, and would diverge",
        where="distributed.tp_size",
        value=f"{shown}{more}",
        hint="remove tp_size (fsdp2 shards any model), or write a plan for distributed.tp_plan in which modules that "
        "see only a rank's heads or columns have the style replicated_with_grad_allreduce",
    )
