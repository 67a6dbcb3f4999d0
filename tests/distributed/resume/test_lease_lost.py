"""A run that was suspended for so long that another one took over its directory: what it does when it goes on."""

import os
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.errors import LeaseLost
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support import ranks
from tests.support.runs import training

LOCK_FILE = ".run.lock"
THEIRS = b'{"host": "node7", "boot_id": "x", "pid": 1, "command": "ckpt-train", "beat": 3, "token": "theirs"}'


def another_run_takes_over(directory: Path) -> None:
    """Put another run's record into the place of the lock file, as a takeover does."""
    (directory / "new").write_bytes(THEIRS)
    (directory / "new").rename(directory / LOCK_FILE)
    (
        directory / "LATEST"
    ).unlink()  # as if the other run had started over: a pointer made from now on would be seen
    (directory / "log").write_bytes((directory / "training.jsonl").read_bytes())


def directory_of(owner: Any) -> Path:
    return owner.checkpointer.directory


class LostInAStep(LLMFinetune.loop_class):
    """It happens during the eighth step, after the save of step 5."""

    def train_step(self, batch: Any, control: Any) -> tuple[Any, Any]:
        if self.layout.is_rank0 and self.step_scheduler.step == 7:
            self.run_log.flush()
            another_run_takes_over(directory_of(self))
        return super().train_step(batch, control)


class InASave(training.Recipe):
    """It happens when everything of the second save, step 10, is written, and nothing is published."""

    def build_saves(self) -> Any:
        flush = self.run_log.flush

        def flush_and_lose() -> None:
            flush()
            if (directory_of(self) / "LATEST").exists():
                another_run_takes_over(directory_of(self))

        self.run_log.flush = flush_and_lose  # type: ignore[method-assign]
        return super().build_saves()


InAStep = training.with_loop(training.Recipe, LostInAStep)


def ended(
    recipe: Path, directory: Path, recipe_class: type[training.Recipe], *overrides: str
) -> tuple[str, int, int]:
    """(message, exit code, last step) of a run that lost its lease."""
    made = training.build(
        recipe, "--checkpoint.checkpoint_dir", str(directory), *overrides, recipe_class=recipe_class
    )
    try:
        made.setup()
        made.run()
    except LeaseLost as lost:
        return str(lost), lost.exit_code, made.step_scheduler.step
    finally:
        made.close()
    return "", 0, made.step_scheduler.step


@pytest.mark.parametrize(
    ("num_ranks", "recipe_class", "overrides", "steps"),
    [
        (2, InAStep, (), (8, 9, 10)),
        pytest.param(
            1,
            InASave,
            ("--checkpoint.is_async", "true", "--checkpoint.on_save_failure", "continue"),
            (10, 11, 12),
            marks=pytest.mark.further,
        ),
        (1, InASave, (), (10,)),
    ],
    ids=["step", "asynchronous save", "save"],
)
def test_a_run_that_lost_its_lease_ends_on_all_ranks_and_writes_nothing_more(
    tmp_path: Path,
    num_ranks: int,
    recipe_class: Any,
    overrides: tuple[str, ...],
    steps: tuple[int, ...],
) -> None:
    recipe, directory = training.write_recipe(tmp_path), tmp_path / "run"
    for message, code, step in ranks.run(
        ended, num_ranks, recipe, directory, recipe_class, *overrides, init=False
    ):
        assert "another run has taken over" in message and "process 1 on node7" in message
        assert code == 4 and step in steps
    assert (directory / "training.jsonl").read_bytes() == (directory / "log").read_bytes()
    assert (directory / LOCK_FILE).read_bytes() == THEIRS
    assert [path.name for path in directory.glob("epoch*")] == ["epoch_0_step_5"]
    assert not os.path.lexists(directory / "LATEST")
