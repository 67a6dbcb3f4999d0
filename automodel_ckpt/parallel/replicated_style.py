"""The style of tensor parallelism of modules whose parameters each rank has as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle


class Replicated(ParallelStyle):
    """The style of a module whose own parameters are replicated and applied to plain tensors.

    The parameters become DTensors like all others, because optimizers and norms do not accept a mixture, but the module
    computes with their local values. With *partial*, each rank applies them only to some heads or positions, so their
    gradients are summed over the ranks.
    """

    def __init__(self, *, partial: bool = False) -> None:
        self._partial = partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        owners = [module, *used_by_parent(module)]
        for owner, name, parameter in own_parameters(owners):
            if isinstance(parameter, DTensor):
                continue
            replicated = distribute_tensor(
                parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank
            )
            new = nn.Parameter(replicated, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, new)

        def sum_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
            # A hook must not modify its argument (torch's documentation of register_hook).
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        def use_local_tensors(module: nn.Module, _: Any) -> None:
            for owner, name, parameter in own_parameters(owners):
                if not isinstance(parameter, DTensor):
                    continue
                replaced.append((owner, name, parameter))
                local = parameter.to_local()
                if self._partial and local.requires_grad:
                    local.register_hook(sum_over_ranks)  # type: ignore[no-untyped-call]
                # nn.Module's setattr rejects a tensor that is not a Parameter, and a Parameter would be a new leaf
                # without a gradient path to the DTensor.
                owner._parameters[name] = local  # type: ignore[assignment]

        def restore_parameters(module: nn.Module, *_: Any) -> None:
            for owner, name, parameter in replaced:
                owner._parameters[name] = parameter
            replaced.clear()

        module.register_forward_pre_hook(use_local_tensors)
        # always_call: an error in the forward pass must not leave plain tensors behind.
        module.register_forward_hook(restore_parameters, always_call=True)
        return module


def used_by_parent(module: nn.Module) -> list[nn.Module]:
    """The children of *module* whose parameters its forward pass uses without calling the children.

    A ParameterDict is never called. Layers with a state (Mamba) pass the weight of their convolution to a kernel.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return []
    kinds = (nn.ParameterDict, nn.Conv1d)
    return [child for child in module.children() if isinstance(child, kinds)]


def own_parameters(owners: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name in it, parameter) of each parameter that belongs to one of *owners* directly."""
    found = []
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                found.append((owner, name, parameter))
    return found
