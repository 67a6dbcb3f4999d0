"""A run goes back when its loss spikes, leaves out the batch, and does the same after a kill."""

import signal
from pathlib import Path
from typing import Any

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support import ranks
from tests.support.checkpoints import goodput_of
from tests.support.runs import training
from tools.support import log_lines, step_lines

STEPS = 9
SPIKE = 5
"""The step whose batch has a loss far above the others, in the first of two epochs of six steps."""
OPTIONS = (
    "--checkpoint.save_consolidated=false",
    f"--step_scheduler.max_steps={STEPS}",
    "--step_scheduler.num_epochs=3",
    "--step_scheduler.ckpt_every_steps=2",
    "--step_scheduler.on_spike.window=2",
    "--step_scheduler.on_spike.rollback=2",
    "--step_scheduler.on_spike.skip=3",
    "--logging.sample_ids=true",
)


class PoisonedLoop(LLMFinetune.loop_class):
    def train_step(self, batch: Any, control: Any) -> tuple[Any, Any]:
        loss, norm = super().train_step(batch, control)
        is_poisoned = (batch.epoch, batch.index) == (0, SPIKE - 1)
        return (100 * loss if is_poisoned else loss), norm


class Poisoned(training.Recipe):
    loop_class = PoisonedLoop


class Killed(training.Recipe):
    """It is killed after it went back, when the batches are to be left out."""

    class Loop(PoisonedLoop):
        def run_epoch(self) -> None:
            super().run_epoch()
            if self.divergence.skip_is_due():
                signal.raise_signal(signal.SIGKILL)

    loop_class = Loop


def run(recipe: Path, directory: Path, recipe_class: Any) -> dict[str, str]:
    where = f"--checkpoint.checkpoint_dir={directory}"
    return training.train(recipe, where, *OPTIONS, recipe_class=recipe_class)


def test_the_run_goes_back_without_the_batches_and_a_killed_one_does_the_same(
    tmp_path: Path,
) -> None:
    recipe = training.write_recipe(tmp_path)
    ranks.run(run, 1, recipe, tmp_path / "calm", training.Recipe, init=False)
    expected = ranks.run(run, 2, recipe, tmp_path / "run", Poisoned, init=False)
    log = tmp_path / "run/training.jsonl"
    steps = step_lines(log)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    # Step 3 is repeated from the checkpoint of step 2. Then the batches of steps 4 to 6 are left out.
    order = [line["samples"] for line in step_lines(tmp_path / "calm/training.jsonl")]
    assert [record["samples"] for record in steps][:6] == order[:3] + order[6:9]
    (event,) = (line for line in log_lines(log) if line.get("event") == "rollback")
    assert (event["step"], event["spike_step"], event["skipped_batches"]) == (2, SPIKE, 3)
    assert "times the median" in event["reason"]
    # It is still one start.
    found = goodput_of(tmp_path / "run")
    (start,) = found["starts"]
    assert start["outcome"] == "done"
    assert found["lost_steps"] == SPIKE - 2

    ended = ranks.outcomes(run, 2, recipe, tmp_path / "killed", Killed, init=False)
    assert [outcome.exitcode for outcome in ended] == [-signal.SIGKILL] * 2
    assert ranks.run(run, 2, recipe, tmp_path / "killed", Poisoned, init=False) == expected
    events = [record.get("event") for record in log_lines(tmp_path / "killed" / "training.jsonl")]
    assert events.count("rollback") == 1
    again = [
        record for record in log_lines(tmp_path / "killed" / "training.jsonl") if "loss" in record
    ]
    assert [record["loss"] for record in again] == [record["loss"] for record in steps]
