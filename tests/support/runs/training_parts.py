"""Plug-ins that the tests' recipes name (with ``--trust tests``), and recipes with additions."""

import math
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset
from transformers import LlamaConfig

from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.counters.step_scheduler import Due
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import Control, LossSum, Number


def with_loop(loop: type[TrainingLoop]) -> Any:
    """A recipe with another loop."""
    return type(loop.__name__, (LLMFinetune,), {"loop_class": loop})


class Stream(IterableDataset[dict[str, list[int]]]):
    """*length* samples, a number that is not known in advance."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for number in range(self.length):
            tokens = [3 + (number * 7 + position * 11) % 200 for position in range(8)]
            yield {"input_ids": tokens, "labels": tokens}


class SomeWithoutLabels:
    """16 samples; the first eight, a global batch when not shuffled, have no label."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = [3 + (index * 7 + position * 11) % 200 for position in range(8)]
        return {"input_ids": tokens, "labels": [-100] * 8 if index < 8 else tokens}


def samples(kind: str) -> Any:
    """Data sets that are not what they should be, by *kind*."""
    tokens, mask = [1, 9, 8, 7], [1, 1, 1, 0]
    changed = {"input_ids": [1, 9, 9999, 7], "labels": [1, 9, 8, -7], "attention_mask": mask}[kind]
    return [{"input_ids": tokens, "labels": tokens} | {kind: changed}] * 8


def splits() -> dict[str, Any]:
    return {"train": samples("labels")}


def part(name: str) -> Any:
    """A part of another kind than the recipe needs."""
    made: dict[str, Callable[[], Any]] = {
        "relu": torch.nn.ReLU,
        "config": LlamaConfig,
        "lazy": lambda: torch.nn.LazyLinear(3),
        "shared": _with_shared_memory,
    }
    return made[name]()


def _with_shared_memory() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 2), torch.nn.Linear(2, 8, bias=False))
    model[1].weight.data = model[0].weight.data
    return model


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy as a mean, which a recipe rejects."""
    return F.cross_entropy(logits.float(), labels)


def detached_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy without a gradient, with which nothing would be trained."""
    return F.cross_entropy(logits.detach().float(), labels, reduction="sum")


def runs_out_of_memory(call: int, rank: int, when: str = "call") -> Any:
    """A loss for which the device of *rank* has no memory: in its *call*-th call (from 1), or when it is built."""

    def allocate() -> None:
        if int(os.environ.get("RANK", "0")) == rank:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB. See ..."
            )

    if when == "build":
        allocate()
    calls = 0

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            allocate()
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    return loss_fn


class RandomInValidationObjective(Objective):
    """Draws a random number from each generator for every validation batch."""

    def losses(self, micro_batches: Sequence[Tensors]) -> Iterable[torch.Tensor]:
        torch.rand(1)
        numpy.random.random()
        random.random()
        return super().losses(micro_batches)


class RandomInValidation(LLMFinetune):
    objective_class = RandomInValidationObjective


class SignalledLoop(TrainingLoop):
    """Rank 1 (or the only one) gets SIGTERM after step 3."""

    def step(self, batch: GlobalBatch, control: Control) -> Due:
        due = super().step(batch, control)
        if self.step_scheduler.step == 3 and self.layout.rank == self.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return due


Signalled = with_loop(SignalledLoop)


class SignalledInValidationLoop(TrainingLoop):
    """The last rank gets SIGTERM when a validation starts."""

    def validate(self) -> Any:
        if self.layout.rank == self.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().validate()


SignalledInValidation = with_loop(SignalledInValidationLoop)


class SignalledInStepLoop(TrainingLoop):
    """The last rank gets SIGTERM in step 5."""

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[Number, Number]:
        if self.step_scheduler.step == 4 and self.layout.rank == self.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_step(batch, control)


SignalledInStep = with_loop(SignalledInStepLoop)


class StoppedInValidation(TrainingLoop):
    """A stop is requested during each validation."""

    def validate(self) -> None:
        return None


class BadGradients(TrainingLoop):
    """The gradients of steps 3 and 4, and of all steps from 6, are not finite."""

    def clip_gradients(self) -> Number:
        step = self.step_scheduler.step + 1
        if step in (3, 4) or step >= 6:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(math.nan)
        return super().clip_gradients()


class QueuesSteps(TrainingLoop):
    """The numbers of a step are read after the next one is queued, as on a GPU."""

    def queues_work(self) -> bool:
        return True


TOKENS = torch.arange(3, 19).reshape(1, 16)
"""What the model of :class:`WithLogits` answers at the end."""


class WithLogitsLoop(TrainingLoop):
    """At the end rank 0 keeps what the trained model answers in logits.pt."""

    def end(self) -> None:
        super().end()
        self.model.eval()
        with torch.no_grad():
            logits = self.model(input_ids=TOKENS).logits
        if self.layout.is_rank0:
            torch.save(logits, Path(self.config.checkpoint.checkpoint_dir) / "logits.pt")


WithLogits = with_loop(WithLogitsLoop)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class WithValueLoss(Objective):
    """Adds the loss of something else than the model."""

    value_loss: Callable[[], torch.Tensor]

    def loss(self, micro_batch: Any) -> LossSum:
        result = super().loss(micro_batch)
        return replace(result, loss=result.loss + self.value_loss())


class CountingLoop(TrainingLoop):
    latest_eval: Counter

    def step(self, batch: GlobalBatch, control: Control) -> Due:
        self.latest_eval.count += 10
        return super().step(batch, control)


class WithMore(LLMFinetune):
    """A value head beside the model, trained by the same optimizer, and a counter."""

    objective_class = WithValueLoss
    loop_class = CountingLoop

    def build_optimizer(self) -> torch.optim.Optimizer:
        torch.manual_seed(3)
        self.value_head = nn.Linear(4, 1)
        self.latest_eval = Counter()
        parameters = [*self.model.parameters(), *self.value_head.parameters()]
        return torch.optim.AdamW(parameters, lr=1e-2)

    def build_loop(self) -> TrainingLoop:
        loop = super().build_loop()
        assert isinstance(loop, CountingLoop)
        loop.latest_eval = self.latest_eval
        return loop

    def build_objective(self) -> Objective:
        objective = super().build_objective()
        assert isinstance(objective, WithValueLoss)
        objective.value_loss = lambda: self.value_head(torch.ones(4)).square().sum()
        return objective


def uneven(num_samples: int) -> list[dict[str, list[int]]]:
    """Samples of 3 to 9 tokens, the first two of which have no label."""
    lengths = [3 + 5 * number % 7 for number in range(num_samples)]
    rows = [
        [3 + (7 * number + 11 * place) % 200 for place in range(n)]
        for number, n in enumerate(lengths)
    ]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows]
