"""Replicas of a model are compared bit by bit, and the ranks that differ are named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.errors import AutomodelError
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support import ranks
from tests.support.runs import training


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "named"),
    [
        (3, "{strategy: ddp}", "rank 1"),
        # Ranks 1 and 3 have the same shard, and no third rank has it.
        pytest.param(
            4, "{strategy: fsdp2, dp_replicate_size: 2}", "rank 1, 3", marks=pytest.mark.further
        ),
    ],
)
def test_a_run_ends_before_it_saves_replicas_that_differ(
    num_ranks: int, strategy: str, named: str, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    recipe = training.write_recipe(tmp_path)
    options = (
        f"--checkpoint.memory.directory={memory}",
        "--checkpoint.verify_replicas=true",
        "--step_scheduler.ckpt_every_steps=3",
        f"--step_scheduler.global_batch_size={4 * num_ranks}",
        f"--distributed={strategy}",
    )
    messages = ranks.run(corrupted, num_ranks, recipe, tmp_path / "run", *options, init=False)
    assert len(set(messages)) == 1
    assert f"replicas of the model differ after step 3: {named} has other values" in messages[0]
    assert "checkpoint.verify_replicas: model.embed_tokens.weight" in messages[0]
    (directory,) = memory.iterdir()
    assert [path.name for path in directory.glob("epoch_*")] == ["epoch_0_step_2"]
    assert list((tmp_path / "run").glob("epoch_*")) == []


def corrupted(recipe: Path, directory: Path, *options: str) -> str:
    """Trains on replicas, of which one gets a flipped bit in the third step; how the run ends."""
    with pytest.raises(AutomodelError) as caught:
        training.train(
            recipe, f"--checkpoint.checkpoint_dir={directory}", *options, recipe_class=Corrupted
        )
    return str(caught.value)


class CorruptedLoop(LLMFinetune.loop_class):
    def step(self, batch: Any, control: Any) -> Any:
        due = super().step(batch, control)
        if self.step_scheduler.step == 3 and self.layout.rank == 1:
            with torch.no_grad():
                weight: Any = next(iter(self.model.parameters()))
                local = weight.to_local() if hasattr(weight, "to_local") else weight
                local.view(torch.int32).flatten()[0] ^= 1
        return due


class Corrupted(training.Recipe):
    loop_class = CorruptedLoop
