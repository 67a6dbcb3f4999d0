"""Equal parts of a tensor from all data parallel ranks, with gradients to the ranks that they come from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from automodel_ckpt.parallel.mesh import RankLayout


def data_group(layout: RankLayout) -> dist.ProcessGroup | None:
    """Create the group of the ranks with other parts of each global batch, ordered by ``dp_rank``; None for one rank.

    Ranks that differ in their tensor parallel coordinate are in different groups, which have the same samples. A
    collective: every rank calls it once.
    """
    sizes = layout.sizes
    if sizes.dp == 1:
        return None
    # The order of dimensions must match build_mesh: tp is innermost.
    shape, names = (sizes.pp, sizes.dp, sizes.cp * sizes.tp), ("pp", "dp", "rest")
    mesh = init_device_mesh(layout.device.type, shape, mesh_dim_names=names)
    return mesh.get_group("dp")


def gather_parts(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Stack the *part* of each rank, which has the same shape on all of them: [ranks, ...]. A collective.

    The gradient of a part is the sum of its gradients on all ranks, so that the sum of the losses of all ranks has the
    gradient that one process with all parts would compute. The backward pass is a collective too. Without a *group*,
    there is one part.
    """
    if group is None:
        return part.unsqueeze(0)
    return _Gather.apply(part, group)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    """A stack over the ranks. Its backward pass adds the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
