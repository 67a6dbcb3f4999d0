"""The recipe that ``ckpt-train`` runs for :mod:`tools.bench.loop`: it alternates with a bare loop in its processes and
process group."""

from __future__ import annotations

from typing import Any

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop
from tools.bench.loop_ways import DOCSTRINGS, PACK, Plan, Steps


def recipe_of(plan: Plan) -> dict[str, Any]:
    """The recipe file that trains as the bare loop does; JSON is YAML."""
    size, way = plan.size, plan.last
    docs = "automodel_ckpt.examples.data.python_docs"
    builder = {"_target_": f"{docs}.language_modeling", "seq_length": size.length}
    if way.data != "blocks":
        builder = {"_target_": f"{docs}.docstring_pairs", **DOCSTRINGS}
    batch = 1 if way.packed else size.batch
    return {
        "recipe": f"{__name__}.{Launched.__name__}",
        "seed": 0,
        "model": {"from_config": {"model_type": "llama", **size.config}},
        "tokenizer": {"_target_": f"{docs}.train_tokenizer", "vocab_size": size.vocab},
        "dataset": builder,
        "optimizer": {"lr": 1e-4},
        "step_scheduler": {
            "global_batch_size": batch * way.ranks,
            "local_batch_size": batch,
            "max_steps": plan.turns().steps[plan.ways[-1]].limit,
            "num_epochs": None,
            "ckpt_every_epochs": None,
        },
        "dataloader": {"drop_last": True},
        "logging": {"level": "warning", "log_every_seconds": 600},
        **({"packed_sequence": {"size": PACK}} if way.packed else {}),
    }


def timed_loop(steps: Steps) -> type[TrainingLoop]:
    """The class of a loop that notes its *steps*, and neither validates nor saves."""

    class TimedLoop(TrainingLoop):
        def step(self, batch: Any, control: Any) -> Any:
            due = super().step(batch, control)
            steps.note(control.num_tokens)
            return due

        def end(self) -> None: ...

        def validate_and_save(self, **due: Any) -> None: ...

    return TimedLoop


class Launched(LLMFinetune):
    """Trains in turns with a bare loop, without checkpoints."""

    def build_loop(self) -> TrainingLoop:
        self._plan = Plan.of_this_process()
        self._turns = self._plan.turns()
        self.loop_class = timed_loop(self._turns.steps[self._plan.ways[-1]])
        return super().build_loop()

    def run(self) -> None:
        def run_recipe(steps: Steps) -> None:
            super(Launched, self).run()

        self._plan.train(self._turns, run_recipe)
