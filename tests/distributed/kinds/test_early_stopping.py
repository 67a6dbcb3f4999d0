"""A run that ends early because a metric does not improve, or because its steps are not finite."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.errors import Stopped
from tests.support import ranks
from tests.support.runs.training import (
    EXPORT,
    RECIPE,
    VALIDATION,
    Recipe,
    killed_after,
    train,
    with_loop,
    write_recipe,
)
from tests.support.runs.training_parts import BadGradients, QueuesSteps, StoppedInValidation

UNCHANGED = (
    "--optimizer.lr=0",
    "--step_scheduler.val_every_steps=2",
    "--step_scheduler.early_stopping.patience=3",
)
"""Equal losses in the validations of steps 2, 4, 5 (which is saved) and 6, where the patience ends."""


def run(run_directory: Path, *overrides: str, num_ranks: int = 1, **how: Any) -> Any:
    """Train; returns the outcomes of the ranks."""
    directory = f"--checkpoint.checkpoint_dir={run_directory}"
    recipe = write_recipe(run_directory.parent, RECIPE + VALIDATION)
    training = partial(train, recipe, directory, *overrides, **how)
    return ranks.outcomes(training, num_ranks, init=False)


def steps_in(run_directory: Path, log: str) -> list[int]:
    text = (run_directory / log).read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [record["step"] for record in found if "event" not in record]


def saved(run_directory: Path) -> list[str]:
    return sorted(path.name for path in run_directory.glob("epoch_*"))


def values(outcomes: Sequence[Any]) -> list[Any]:
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def test_it_ends_at_the_same_step_after_a_kill_or_a_signal_and_goes_on_with_more_patience(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = values(run(tmp_path / "whole", *UNCHANGED, EXPORT))
    log = capfd.readouterr().err
    reason = "early stopping: val_loss did not improve on"
    assert reason in log and "of step 2 in the last 3 validations" in log
    assert "the run ended at step 6" in log and "Hugging Face export" in log
    assert steps_in(tmp_path / "whole", "training.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps_in(tmp_path / "whole", "validation.jsonl") == [2, 4, 5, 6]
    assert saved(tmp_path / "whole") == ["epoch_0_step_5", "epoch_0_step_6"]
    run(tmp_path / "killed", *UNCHANGED, recipe_class=killed_after(6))
    assert saved(tmp_path / "killed") == ["epoch_0_step_5"]
    assert values(run(tmp_path / "killed", *UNCHANGED)) == whole
    assert steps_in(tmp_path / "killed", "validation.jsonl") == [2, 4, 5, 6]
    capfd.readouterr()
    assert values(run(tmp_path / "killed", *UNCHANGED)) == whole
    assert f"already complete at step 6: {reason}" in capfd.readouterr().err
    run(tmp_path / "whole", *UNCHANGED[:2], "--step_scheduler.early_stopping.patience=5")
    assert steps_in(tmp_path / "whole", "validation.jsonl") == [2, 4, 5, 6, 8, 10]
    assert saved(tmp_path / "whole")[-1] == "epoch_1_step_10"


def test_a_validation_that_a_signal_prevented_counts_when_it_is_made_up(tmp_path: Path) -> None:
    options = ("--optimizer.lr=0", "--step_scheduler.early_stopping.patience=1")
    values(run(tmp_path / "whole", *options))
    assert saved(tmp_path / "whole") == ["epoch_0_step_5", "epoch_1_step_10"]
    directory = tmp_path / "stopped"
    values(run(directory, *options, "--step_scheduler.max_steps=5"))
    (stopped,) = run(directory, *options, recipe_class=with_loop(Recipe, StoppedInValidation))
    assert isinstance(stopped.error, Stopped) and saved(directory) == saved(tmp_path / "whole")
    values(run(directory, *options, EXPORT))
    assert saved(directory) == saved(tmp_path / "whole")
    assert (directory / "LATEST/model/consolidated").is_dir()
    assert steps_in(directory, "validation.jsonl") == [5, 10]


def test_steps_that_are_not_finite_stop_the_run_and_leave_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    bad = with_loop(Recipe, BadGradients)
    often = ("--step_scheduler.ckpt_every_steps=2", "--distributed.strategy=fsdp2")
    limit = "--step_scheduler.stop_after_nonfinite_steps=3"
    how: dict[str, Any] = {"num_ranks": 2, "recipe_class": bad}
    memory = tmp_path / "memory"
    memory.mkdir()
    copies = (f"--checkpoint.memory.directory={memory}", "--checkpoint.keep_last=1")
    outcomes = run(tmp_path / "limited", *often, limit, *copies, **how)
    for outcome in outcomes:
        message = str(outcome.error)
        assert "not finite in 3 consecutive steps, the last of which is step 8" in message
        assert "gradient norm nan" in message and "lower optimizer.lr" in message
        assert "the newest checkpoint is epoch_0_step_2" in message
    assert saved(tmp_path / "limited") == ["epoch_0_step_2"]
    (copied,) = memory.iterdir()
    assert saved(copied) == ["epoch_0_step_5"]
    assert steps_in(tmp_path / "limited", "training.jsonl") == list(range(1, 9))
    # A host that runs ahead has queued step 9 when it reads the numbers of step 8, and saves nothing in between.
    # With on_spike, they are spikes from which the run cannot go back.
    how = {"recipe_class": with_loop(bad, QueuesSteps)}
    cannot_go_back = "--step_scheduler.on_spike.rollback=100"
    for outcome in run(tmp_path / "ahead", *often, limit, cannot_go_back, **how):
        assert "the last of which is step 8" in str(outcome.error)
    assert saved(tmp_path / "ahead") == ["epoch_0_step_2"]
    how["recipe_class"] = bad
    values(run(tmp_path / "unlimited", *often, **how))
    assert saved(tmp_path / "unlimited")[-1] == "epoch_1_step_8"
