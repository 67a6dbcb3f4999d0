"""What the ranks of the `signals` campaign run: a tiny recipe that notes when it does what."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.saving.async_saves import AsyncSaves
from automodel_ckpt.checkpoint.saving.publisher import Exports
from automodel_ckpt.checkpoint.saving.save import SaveReport
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.saves.saves import Saves
from automodel_ckpt.training.values.records import Control, LossSum, Number
from tests.support.runs.marks import MICRO_BATCH_SECONDS, hang, mark


class MarkedSaves(Saves):
    """Marks when a save begins, when it returns, and when its checkpoint is published."""

    def save_now(self, *arguments: Any, **options: Any) -> SaveReport:
        mark("save", self._scheduler.step)
        report = super().save_now(*arguments, **options)
        mark("saved" if report.published else "upload")
        return report

    def note_saved(self, report: SaveReport) -> None:
        mark("published")
        super().note_saved(report)


class MarkedObjective(Objective):
    """Marks each micro-batch, in training and in validation."""

    left = 0
    """Micro-batches of the global batch that are not trained on yet."""
    scheduler: StepScheduler

    def loss(self, micro_batch: Mapping[str, torch.Tensor]) -> LossSum:
        if self.model.training:
            self.left -= 1
            mark("accumulation" if self.left else "step", self.scheduler.step)
            hang("step")
        else:
            mark("validation")
        time.sleep(MICRO_BATCH_SECONDS)
        return super().loss(micro_batch)


class MarkedLoop(TrainingLoop):
    """Marks waiting for data, the end of a step, and a stop."""

    def batches(self, source: Iterable[GlobalBatch]) -> Iterator[GlobalBatch | None]:
        name = "data" if source is self.dataloader else "batch"
        mark(name, self.step_scheduler.step)
        for batch in super().batches(source):
            mark("agree" if name == "data" else name)
            yield batch
            mark(name, self.step_scheduler.step)

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[Number, Number]:
        assert isinstance(self.objective, MarkedObjective)
        self.objective.left = len(batch.micro_batches)
        result = super().train_step(batch, control)
        mark("finish")
        return result

    def stop(self) -> NoReturn:
        mark("stop", self.step_scheduler.step)
        super().stop()


class Marked(LLMFinetune):
    """The language model recipe, each phase a little longer than its work takes."""

    objective_class = MarkedObjective
    saves_class = MarkedSaves
    loop_class = MarkedLoop

    def build_checkpointer(self) -> Checkpointer | None:
        checkpointer = super().build_checkpointer()
        owners: tuple[tuple[Any, str], ...] = (
            (Exports, "export_save"),
            (AsyncSaves, "_export_in_background"),
        )
        for owner, name in owners:
            setattr(owner, name, _between("export", "exported", getattr(owner, name)))
        return checkpointer

    def build_objective(self) -> Objective:
        objective = super().build_objective()
        assert isinstance(objective, MarkedObjective)
        objective.scheduler = self.step_scheduler
        return objective


def _between(begun: str, ended: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*arguments: Any) -> Any:
        mark(begun)
        try:
            return function(*arguments)
        finally:
            mark(ended)

    return marked
