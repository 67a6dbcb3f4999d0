"""Gradient accumulation reduces gradients over the ranks after each micro-batch, or once per step."""

from __future__ import annotations

import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_ckpt.parallel.parallelize import Parallelism, gradient_sync, parallelize
from automodel_ckpt.training.loop import TrainingLoop
from tests.distributed.kinds.test_training import lines_of_steps, run_each
from tests.support import ranks
from tests.support.runs.parallel import layout_here, model_of
from tests.support.runs.training import Recipe, with_loop


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


def test_gradients_are_reduced_as_often_as_the_recipe_asks(tmp_path: Path) -> None:
    fsdp2, ddp = "--distributed.strategy=fsdp2", "--distributed.strategy=ddp"
    reduces = {
        "fsdp2 by default": (fsdp2,),
        "fsdp2 deferring": (fsdp2, "--distributed.defer_gradient_sync=true"),
        "ddp": (ddp,),
    }
    steps = (
        "--step_scheduler.max_steps=2",
        "--checkpoint.save_consolidated=false",
        "--model.from_config.attention_dropout=0",
    )
    names = {(how, local): f"{how}_{local}" for how in reduces for local in (4, 1)}
    runs = {}
    for (how, local), name in names.items():
        runs[name] = (*reduces[how], *steps, f"--step_scheduler.local_batch_size={local}")
    run_each(tmp_path, runs, num_ranks=2, recipe_class=Counted)
    counts, losses = {}, {}
    for case, name in names.items():
        found = [json.loads(path.read_text()) for path in (tmp_path / name).glob("counts_*")]
        assert len(found) == 2
        assert found[0] == found[1] >= 1
        counts[case] = found[0]
        losses[case] = [line["loss"] for line in lines_of_steps(tmp_path / name / "training.jsonl")]

    # Each rank has four samples in a step: one micro-batch, or four.
    assert counts["fsdp2 by default", 1] == 4 * counts["fsdp2 by default", 4]
    assert counts["fsdp2 deferring", 1] == counts["fsdp2 deferring", 4]
    assert counts["ddp", 1] == counts["ddp", 4]
    for found_losses in losses.values():
        assert found_losses == pytest.approx(losses["ddp", 4], rel=1e-6)


def test_only_deferring_keeps_the_gradient_of_the_complete_model() -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in model_of(vocab_size=64).parameters())
    # The shard of the gradient; with deferring the gradient itself, and the gathered parameters.
    for defers, expected in ((False, num_bytes / 2), (True, 2 * num_bytes)):
        for kept in ranks.run(partial(bytes_kept, defers, expected), 2):
            assert kept == pytest.approx(expected, rel=0.1)


def bytes_kept(defers: bool, expected: float) -> int:
    """Bytes that the backward pass of a micro-batch leaves allocated, if it is not the last one of its step."""
    how = Parallelism("fsdp2", defer_gradient_sync=defers)
    model = parallelize(model_of(vocab_size=64), layout_here(), how)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    before = live_storages()
    with gradient_sync(model, enabled=False):
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    deadline = time.monotonic() + 30
    while True:
        # What earlier tests left in this process may be freed meanwhile.
        after = live_storages()
        kept = sum(after[key].nbytes() for key in after.keys() - before.keys())
        # A thread of gloo holds the tensors of a finished collective until it runs again.
        if kept <= 1.1 * expected or time.monotonic() > deadline:
            return kept
        time.sleep(0.05)


def live_storages() -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in this process, which stay as long as the result is held."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) not in (torch.Tensor, torch.nn.Parameter):
            continue
        # A gradient is an object of Python only while it is in use there.
        for tensor in (found, found.grad if found.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage
    return storages
