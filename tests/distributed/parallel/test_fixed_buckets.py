"""Replicas on three real ranks, whose gradients are summed in buckets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from tests.support import ranks
from tests.support.runs.parallel import layout_here


class _UsedInAnotherOrder(nn.Module):
    """A model that uses its layers in another order than that of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(8, 3)
        self.first = nn.Linear(5, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.third(self.second(self.first(rows)).tanh())
        return output


def _gradients_of_two_steps() -> list[list[torch.Tensor]]:
    """The gradients of the same batch in the first and the second step. Its values differ between the ranks."""
    torch.manual_seed(0)
    layout = layout_here()
    model = parallelize(_UsedInAnotherOrder(), layout, Parallelism(strategy="ddp"))
    torch.manual_seed(dist.get_rank())
    rows = torch.randn(16, 5)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(rows).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


def test_three_ranks_sum_gradients_in_the_same_order_in_the_first_step_and_in_later_ones() -> None:
    for first, second in ranks.run(_gradients_of_two_steps, 3):
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)
