"""An interrupted and resumed run equals an uninterrupted one, bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support import ranks
from tests.support.runs.training import Recipe, killed_after, steps_of, train, write_recipe


def training(
    directory: Path, name: str, *overrides: str, recipe_class: type[LLMFinetune] = Recipe
) -> Callable[[], Any]:
    """What trains to the end in ``directory/name`` on each rank, and returns its final digests."""
    recipe = write_recipe(directory)
    place = f"--checkpoint.checkpoint_dir={directory / name}"
    return partial(train, recipe, place, *overrides, recipe_class=recipe_class)


def kill(
    directory: Path, num_ranks: int, name: str, *overrides: str, kills: tuple[int, ...]
) -> None:
    """Train in ``directory/name``, killed once after each of *kills*."""
    for step in kills:
        killed = training(directory, name, *overrides, recipe_class=killed_after(step))
        ended = ranks.outcomes(killed, num_ranks, init=False)
        assert -9 in [outcome.exitcode for outcome in ended]


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "local_batch_size", "kills"), [(1, 0, 8, (3, 8)), (2, 1, 2, (7,))]
)
def test_killed_between_checkpoints_and_resumed_equals_uninterrupted(
    tmp_path: Path, num_ranks: int, num_workers: int, local_batch_size: int, kills: tuple[int, ...]
) -> None:
    overrides = (
        f"--step_scheduler.local_batch_size={local_batch_size}",
        f"--dataloader.num_workers={num_workers}",
    )
    kill(tmp_path, num_ranks, "interrupted", *overrides, kills=kills)
    names = ("interrupted", "whole")
    trainings = [training(tmp_path, name, *overrides) for name in names]
    interrupted, whole = ranks.run_each(trainings, num_ranks)
    assert interrupted == whole
    steps = steps_of(tmp_path / "whole")
    assert steps_of(tmp_path / "interrupted") == steps
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert sorted(sample for record in steps[:6] for sample in record["samples"]) == list(range(44))


def test_two_ranks_train_on_the_same_global_batches_as_one(tmp_path: Path) -> None:
    overrides = (
        "--step_scheduler.local_batch_size=2",
        "--step_scheduler.max_steps=7",
        "--model.from_config.attention_dropout=0.0",
    )
    ranks.run(training(tmp_path, "one", *overrides), 1, init=False)
    strategies = ("ddp", "fsdp2")
    trainings = [
        training(tmp_path, name, f"--distributed.strategy={name}", *overrides)
        for name in strategies
    ]
    ranks.run_each(trainings, 2)
    one = steps_of(tmp_path / "one")
    for two in (steps_of(tmp_path / name) for name in strategies):
        for name in ("step", "epoch", "samples", "tokens", "label_tokens", "lr"):
            assert [record[name] for record in one] == [record[name] for record in two]
        for mine, theirs in zip(one, two, strict=True):
            for name in ("loss", "grad_norm"):
                found = float.fromhex(theirs[name])
                assert found == pytest.approx(float.fromhex(mine[name]), rel=1e-3)
