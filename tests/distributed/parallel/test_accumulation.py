"""With gradient accumulation, fsdp2 reduces gradients after each micro-batch, or once per step."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import lines_of_steps, run_each
from tests.support.runs.training import Recipe, with_loop


class Reductions(TorchDispatchMode):
    """Counts fsdp2's reductions of gradients."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


class CountingLoop(LLMFinetune.loop_class):
    """Writes down how many reductions the last step makes on rank 0."""

    def train_step(self, *arguments: Any) -> tuple[Any, Any]:
        with Reductions() as reductions:
            result = super().train_step(*arguments)
        if self.layout.is_rank0:
            counts = Path(self.config.checkpoint.checkpoint_dir) / "count.json"
            counts.write_text(json.dumps(reductions.count))
        return result


@pytest.mark.further
def test_gradients_are_reduced_as_often_as_the_recipe_asks(tmp_path: Path) -> None:
    runs = {}
    for deferred in ("true", "false"):
        for local in (4, 1):
            runs[f"{deferred} {local}"] = (
                f"--distributed.defer_gradient_sync={deferred}",
                f"--step_scheduler.local_batch_size={local}",
                "--distributed.strategy=fsdp2",
                "--step_scheduler.max_steps=2",
                "--model.from_config.attention_dropout=0",
            )
    run_each(tmp_path, runs, num_ranks=2, recipe_class=with_loop(Recipe, CountingLoop))
    counts = {name: json.loads((tmp_path / name / "count.json").read_text()) for name in runs}
    # Each rank has four samples in a step: one micro-batch, or four.
    assert counts["false 1"] == 4 * counts["false 4"] > 0
    assert counts["true 1"] == counts["true 4"] == counts["false 4"]
    losses = [
        [line["loss"] for line in lines_of_steps(tmp_path / name / "training.jsonl")]
        for name in runs
    ]
    for found in losses:
        assert found == pytest.approx(losses[0], rel=1e-6)
