"""A loop that counts how often ranks reduce gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_ckpt.training.loop import TrainingLoop


class Reductions(TorchDispatchMode):
    """Counts FSDP2's reductions of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


class CountsReductions(TrainingLoop):
    """Notes how many reductions of gradients each step makes."""

    buckets = 0

    def run(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            # A lambda, since DDP looks at annotations.
            self.model.register_comm_hook(None, lambda state, bucket: self.reduce(bucket))
        super().run()

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.buckets += 1
        return allreduce_hook(torch.distributed.group.WORLD, bucket)  # type: ignore[arg-type]

    def train_step(self, *arguments: Any) -> tuple[float, float]:
        before = self.buckets
        with Reductions() as scattered:
            result = super().train_step(*arguments)
        counts = Path(self.config.checkpoint.checkpoint_dir) / f"counts_{self.layout.rank}.json"
        counts.write_text(json.dumps(scattered.count + self.buckets - before))
        return result
