"""The recipes with a clock: `recipe: tools.gpu.timed.TimedLLM` trains as llm_finetune does, and notes each step."""

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.vlm_finetune import VLMFinetune, VLMLoop
from automodel_ckpt.training.counters.step_scheduler import Due
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.values.records import Control


@dataclass
class Clock:
    """When the steps of this process ended. The device is synchronized only where the counted steps begin and end."""

    warm_up: int = 0
    since: float = 0.0
    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    kill_after_step: int | None = None
    """The process kills itself at the end of this step; None: never."""

    def start(self, warm_up: int) -> None:
        """Begin a run. Its first *warm_up* steps are not counted."""
        self.warm_up = warm_up
        self.since = time.perf_counter()
        self.ends = []
        self.tokens = []

    def note(self, num_tokens: int, *, is_last: bool = False) -> None:
        """Note the end of a step on *num_tokens*."""
        if len(self.ends) + 1 == self.warm_up or is_last:
            synchronize()
        self.ends.append(time.perf_counter())
        self.tokens.append(num_tokens)
        if len(self.ends) == self.warm_up:
            self.since = self.ends[-1]

    def figures(self) -> dict[str, Any]:
        """Seconds per counted step and tokens per second, with the peak of the device's memory."""
        num_steps = max(len(self.ends) - self.warm_up, 1)
        until = self.ends[-1] if self.ends else self.since
        seconds = max(until - self.since, 1e-9)
        return {
            "tokens_per_second": sum(self.tokens[self.warm_up :]) / seconds,
            "seconds_per_step": seconds / num_steps,
            "steps": num_steps,
            "peak_bytes": peak_bytes(),
            "device_bytes": device_bytes(),
        }


CLOCK = Clock()
"""The clock of this process."""


def is_on_gpu() -> bool:
    """Whether this process has used the GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronize() -> None:
    """Wait until the GPU has done its work; does nothing without one."""
    if is_on_gpu():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """The most memory that tensors have taken on the GPU; 0 without one."""
    return torch.cuda.max_memory_allocated() if is_on_gpu() else 0


def device_bytes() -> int:
    """The most memory of the GPU that was not free for others: PyTorch's blocks, CUDA's context; 0 without a GPU."""
    if not is_on_gpu():
        return 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_reserved() + total - free - torch.cuda.memory_reserved()


class TimedLoop(TrainingLoop):
    def step(self, batch: GlobalBatch, control: Control) -> Due:
        due = super().step(batch, control)
        CLOCK.note(control.num_tokens, is_last=due.last)
        if self.step_scheduler.step == CLOCK.kill_after_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return due


class TimedVLMLoop(TimedLoop, VLMLoop):
    pass


class TimedLLM(LLMFinetune):
    loop_class = TimedLoop


class TimedVLM(VLMFinetune):
    loop_class = TimedVLMLoop
