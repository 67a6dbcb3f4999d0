"""A custom recipe: fine-tuning with Lookahead, which keeps slow weights beside the trained ones (arXiv:1907.08610)."""

from dataclasses import dataclass, field

from torch import nn

from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import AT_LEAST_1, FRACTION, setting
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop


@dataclass
class LookaheadSection:
    every_steps: int = setting(5, AT_LEAST_1)
    """Steps between two updates of the slow weights."""
    share: float = setting(0.5, FRACTION)
    """How far an update moves the slow weights to the trained ones, which then continue from there."""


@dataclass
class LookaheadConfig(RecipeConfig):
    lookahead: LookaheadSection = field(default_factory=LookaheadSection)


class SlowWeights(nn.Module):
    """A copy of each parameter of a model, sharded as that is; being a module, it is saved as weights are."""

    def __init__(self, model):
        super().__init__()
        self.pairs = []
        for name, weight in unwrap(model).named_parameters():
            slow = weight.detach().clone()
            self.register_buffer(name.replace(".", "_"), slow)
            self.pairs.append((slow, weight.detach()))

    def update(self, share):
        for slow, weight in self.pairs:
            slow.mul_(1 - share).add_(weight, alpha=share)
            weight.copy_(slow)


class LookaheadLoop(TrainingLoop):
    slow_weights: SlowWeights

    def step(self, batch, control):
        due = super().step(batch, control)
        settings = self.config.lookahead
        if self.step_scheduler.step % settings.every_steps == 0:
            self.slow_weights.update(settings.share)
        return due


class LookaheadFinetune(LLMFinetune):
    Config = LookaheadConfig
    loop_class = LookaheadLoop

    def build(self):
        super().build()
        # Being an attribute is enough: it is found, saved, verified and restored with the others.
        self.slow_weights = SlowWeights(self.model)

    def build_loop(self):
        loop = super().build_loop()
        loop.slow_weights = self.slow_weights
        return loop
