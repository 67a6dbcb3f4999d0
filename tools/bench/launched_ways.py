"""The loops of :mod:`tools.bench.loop_ways` on several ranks, which ``ckpt-train`` starts: the recipe alternates with a
bare loop in its processes and process group."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop
from tools.bench.loop_ways import SIZES, Steps, Turns, bare, recipe_of, timed_loop

PLAN = "BENCH_LOOP_PLAN"
"""The environment variable with a :class:`Plan` as JSON."""


@dataclass(frozen=True)
class Plan:
    """Which loops alternate on *num_ranks* ranks, and the file in which rank 0 leaves the figures."""

    ours: str
    bare: str
    size: str
    num_ranks: int
    output: str

    @property
    def turns(self) -> Turns:
        """The steps of both loops."""
        size = SIZES[self.size]
        return Turns([self.bare, self.ours], size.block, size.blocks)

    def recipe(self) -> dict[str, Any]:
        """The recipe file for ``ckpt-train``; JSON is YAML."""
        num_steps = self.turns.steps[self.ours].limit
        recipe = recipe_of(SIZES[self.size], num_steps, "blocks", self.num_ranks, packed=False)
        return {**recipe, "recipe": f"{Launched.__module__}.{Launched.__name__}"}


class Launched(LLMFinetune):
    """Trains in turns with a bare loop, without checkpoints."""

    def build_loop(self) -> TrainingLoop:
        self._plan = Plan(**json.loads(os.environ[PLAN]))
        self._turns = self._plan.turns
        self.loop_class = timed_loop(self._turns.steps[self._plan.ours])
        return super().build_loop()

    def run(self) -> None:
        plan, turns = self._plan, self._turns
        torch.set_num_threads(1)

        def run_recipe(steps: Steps) -> None:
            super(Launched, self).run()

        size = SIZES[plan.size]
        # The recipe in the main thread, which signals reach.
        turns.run(
            {plan.bare: partial(bare, size=size, num_ranks=plan.num_ranks), plan.ours: run_recipe}
        )
        if self.layout.is_rank0:
            figures = {name: steps.plain() for name, steps in turns.steps.items()}
            Path(plan.output).write_text(json.dumps(figures))
