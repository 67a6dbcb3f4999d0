"""A small model that FSDP2 shards over all ranks, and its training."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.models.tiny import Counter


class ShardedTraining:
    """A sharded model with its optimizer and a counter on each rank. The batches depend on the step alone."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.counter = Counter(dist.get_rank())
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "counter": self.counter}

    def take_step(self) -> None:
        self.step += 1
        torch.manual_seed(self.step)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().sum().backward()
        self.optimizer.step()
        self.counter.value = self.step

    def weights(self) -> list[list[float]]:
        """All parameters and moments, equal on all ranks."""
        found = [parameter.detach() for parameter in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [state["exp_avg"], state["exp_avg_sq"]]
        return [cast(Any, tensor).full_tensor().flatten().tolist() for tensor in found]
