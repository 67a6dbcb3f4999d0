"""A custom recipe: fine-tuning that keeps a moving average of the weights, and validates with it."""

from dataclasses import dataclass, field

from torch import nn

from automodel_ckpt.checkpoint.module_tensors import unwrap
from automodel_ckpt.config.schema import FRACTION, RecipeConfig, setting
from automodel_ckpt.recipes.llm_finetune import LLMFinetune


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
        self.pairs = [
            (weight.detach().clone(), weight.detach()) for weight in unwrap(model).parameters()
        ]
        for (name, _), (average, _) in zip(
            unwrap(model).named_parameters(), self.pairs, strict=True
        ):
            self.register_buffer(name.replace(".", "_"), average)

    def update(self, decay):
        for average, weight in self.pairs:
            average.mul_(decay).add_(weight, alpha=1 - decay)

    def exchange(self):
        for average, weight in self.pairs:
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


class EmaFinetune(LLMFinetune):
    Config = EmaConfig

    def build(self):
        super().build()
        self.average = Average(
            self.model
        )  # all that it takes: found, saved, checked and restored with the others

    def step(self, batch, control):
        due = super().step(batch, control)
        self.average.update(self.config.average.decay)
        return due

    def validate(self):
        self.average.exchange()
        validation = super().validate()
        self.average.exchange()
        return validation
