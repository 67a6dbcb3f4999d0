"""Real trainings of two ranks, one of which is slow, in a layer or before its steps; and of two equal ranks."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from automodel_ckpt.base import device_copies
from automodel_ckpt.logs import timeline
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.values import step_numbers
from automodel_ckpt.training.values.records import Control
from tests.distributed.kinds.test_training import lines, run_each

SECONDS = 0.05
"""What a layer takes on the clock of the ranks."""
COMMON = (
    "--checkpoint.save_consolidated=false",
    "--step_scheduler.max_steps=16",
    "--step_scheduler.num_epochs=null",
    "--step_scheduler.ckpt_every_steps=8",
    "--hangs.straggler_steps=5",
    "--hangs.straggler_share=0.5",
)
RUNS = {
    "forward-fsdp2": ("--distributed.strategy=fsdp2", *COMMON),
    "arrival": (*COMMON, "--hangs.straggler_share=0.3"),
    "none": COMMON,
}


class Clock:
    """Advances by what a rank sleeps, and where it waits for the others before a step, whatever the load is."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def install(self) -> None:
        """Let steps and forward passes be measured with it, for the rest of this process."""
        instead = SimpleNamespace(time=time.time, monotonic=self.read, perf_counter=self.read)
        for module in (device_copies, step_numbers, timeline):
            vars(module)["time"] = instead
        summed = step_numbers.sum_over_ranks

        def arriving_together(*arguments: Any) -> Any:
            result = summed(*arguments)
            newest = torch.tensor(self.now, dtype=torch.float64)
            dist.all_reduce(newest, dist.ReduceOp.MAX)
            self.now = newest.item()
            return result

        vars(step_numbers)["sum_over_ranks"] = arriving_together

    def read(self) -> float:
        return self.now


class Loop(TrainingLoop):
    """Sleeps in the first layer, on rank 1 twice as long, or before each step, as the name of the run asks."""

    clock: ClassVar[Clock | None] = None

    def run(self) -> None:
        if Loop.clock is None:
            Loop.clock = Clock()
            Loop.clock.install()
        for name, module in self.model.named_modules():
            if name.endswith("layers.0.mlp"):
                module.register_forward_pre_hook(self._sleep)
        super().run()

    def _is_slow(self, kind: str) -> bool:
        name = Path(self.config.checkpoint.checkpoint_dir).name
        return self.layout.rank == 1 and name.startswith(kind)

    def _sleep(self, *_: Any) -> None:
        if self.model.training and Loop.clock is not None:
            Loop.clock.sleep(SECONDS * (2 if self._is_slow("forward") else 1))

    def agree_on(self, batch: Any) -> Control:
        if self._is_slow("arrival") and Loop.clock is not None:
            Loop.clock.sleep(2 * SECONDS)
        return super().agree_on(batch)


class Slow(LLMFinetune):
    loop_class = Loop


def reports(run: Path) -> Iterator[dict[str, Any]]:
    for line in lines(run / "training.jsonl"):
        if line.get("event") == "straggler":
            yield line


def test_a_slow_rank_is_reported_with_numbers_and_no_other_is(tmp_path: Path) -> None:
    run_each(tmp_path, RUNS, num_ranks=2, recipe_class=Slow)
    assert list(reports(tmp_path / "none")) == []
    for name in ("forward-fsdp2", "arrival"):
        found = list(reports(tmp_path / name))
        assert [(each["step"], each["rank"], each["steps"]) for each in found] == [
            (10, 1, 10),
            (15, 1, 5),
        ], (name, found)
        assert {each["part"] for each in found} == {name.partition("-")[0]}
        text = (tmp_path / name / "log.txt").read_text()
        assert text.count("is slower than the others") == 1, "after 10 steps, then after 20"
        for each in found:
            if name == "arrival":
                # The mean of five steps, not their sum.
                expected = {"seconds": 2 * SECONDS, "usual_seconds": 3 * SECONDS, "share": 2 / 3}
            else:
                # Without the layers, they would take no time.
                expected = {"seconds": 2 * SECONDS, "usual_seconds": SECONDS, "share": 1.0}
            assert {key: each[key] for key in expected} == pytest.approx(expected, rel=1e-6)
