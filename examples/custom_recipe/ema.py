"""A custom recipe: fine-tuning that keeps a moving average of the weights, and validates with it."""

from dataclasses import dataclass, field

from torch import nn

from automodel_ckpt.checkpoint.module_tensors import unwrap
from automodel_ckpt.config.rules import FRACTION, setting
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.loop import TrainingLoop


@dataclass
class AverageSection:
    decay: float = setting(0.99, FRACTION)
    """Weight of the old average in each step. The new weights have 1 - decay."""


@dataclass
class EmaConfig(RecipeConfig):
    average: AverageSection = field(default_factory=AverageSection)


class Average(nn.Module):
    """An average for each parameter of a model, sharded as that is; being a module, it is saved as weights are."""

    def __init__(self, model):
        super().__init__()
        self.pairs = []
        for name, weight in unwrap(model).named_parameters():
            average = weight.detach().clone()
            self.register_buffer(name.replace(".", "_"), average)
            self.pairs.append((average, weight.detach()))

    def update(self, decay):
        for average, weight in self.pairs:
            average.mul_(decay).add_(weight, alpha=1 - decay)

    def exchange(self):
        for average, weight in self.pairs:
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


class EmaLoop(TrainingLoop):
    average: Average

    def step(self, batch, control):
        due = super().step(batch, control)
        self.average.update(self.config.average.decay)
        return due

    def validate(self):
        self.average.exchange()
        validation = super().validate()
        self.average.exchange()
        return validation


class EmaFinetune(LLMFinetune):
    Config = EmaConfig
    loop_class = EmaLoop

    def build(self):
        super().build()
        # Being an attribute is enough: it is found, saved, verified and restored with the others.
        self.average = Average(self.model)

    def build_loop(self):
        loop = super().build_loop()
        loop.average = self.average
        return loop
