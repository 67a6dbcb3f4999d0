"""Gradient accumulation reduces gradients over the ranks once a step, however many micro-batches there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_ckpt.recipes.loop import TrainingLoop
from tests.distributed.test_training import run
from tests.support.training import Recipe, with_loop


class Reductions(TorchDispatchMode):
    """Counts FSDP2's reductions of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


class CountingLoop(TrainingLoop):
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


Counted = with_loop(Recipe, CountingLoop)


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_gradients_are_reduced_once_a_step(tmp_path: Path, strategy: str) -> None:
    overrides = (f"--distributed.strategy={strategy}", "--step_scheduler.max_steps=2")
    counts = []
    for local in (4, 1):
        name = f"local{local}"
        sizes = f"--step_scheduler.local_batch_size={local}"
        run(tmp_path, *overrides, sizes, name=name, num_ranks=2, recipe_class=Counted)
        counts.append(
            [json.loads((tmp_path / name / f"counts_{rank}.json").read_text()) for rank in (0, 1)]
        )
    assert counts[0] == counts[1]
    assert counts[0][0] >= 1
