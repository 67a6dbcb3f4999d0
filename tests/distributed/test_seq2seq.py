"""The recipe ``seq2seq``: any ranks train like one process; a killed run continues exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.recipes.seq2seq import Seq2Seq
from tests.support import ranks
from tests.support.training import killed_after, steps_of, train
from tests.unit.training.test_seq2seq import MODELS, losses, write

BATCHES = "--step_scheduler.max_steps=4"
WAYS: dict[str, tuple[str, ...]] = {
    "fsdp2": ("--model.activation_checkpointing=true",),
    "ddp": ("--distributed.strategy=ddp", "--step_scheduler.local_batch_size=1"),
    "lora": ("--peft={r: 2, target_modules: all-linear, base_dir: BASE}",),
}


def training(recipe: Path, name: str, *arguments: str) -> Callable[[], dict[str, str]]:
    directory = f"--checkpoint.checkpoint_dir={recipe.parent / name}"
    return partial(train, recipe, *arguments, directory, recipe_class=Seq2Seq)


@pytest.mark.parametrize("model", ["tied", "bart"])
def test_ranks_train_like_one_process(tmp_path: Path, model: str) -> None:
    recipe = write(tmp_path, MODELS[model])
    ways = WAYS if model == "tied" else {"fsdp2": WAYS["fsdp2"]}
    both, alone = [], []
    for name, options in ways.items():
        given = [option.replace("BASE", str(tmp_path / "base")) for option in options]
        # An average of the weights is state, too.
        both.append(training(recipe, name, BATCHES, *given))
        # One process computes whole global batches.
        adapters = [option for option in given if "peft" in option]
        whole = "--step_scheduler.local_batch_size=4"
        alone.append(training(recipe, f"{name}-alone", BATCHES, whole, *adapters))
    ranks.run_each(alone, 1)
    ranks.run_each(both, 2)
    for name in ways:
        expected = losses(tmp_path / f"{name}-alone")
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-4), name


def test_a_killed_run_continues_exactly(tmp_path: Path) -> None:
    recipe = write(tmp_path, MODELS["tied"].replace("dropout_rate: 0.0", "dropout_rate: 0.2"))
    arguments = (
        "--step_scheduler.max_steps=6",
        "--step_scheduler.ckpt_every_steps=2",
        "--ema={decay: 0.9}",
    )
    killed = (*arguments, f"--checkpoint.checkpoint_dir={tmp_path / 'killed'}")
    dying = partial(train, recipe, recipe_class=killed_after(5, recipe_class=Seq2Seq))
    ended = ranks.outcomes(dying, 2, *killed, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    both = [training(recipe, name, *arguments) for name in ("killed", "whole")]
    resumed, whole = ranks.run_each(both, 2)
    assert resumed == whole
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
