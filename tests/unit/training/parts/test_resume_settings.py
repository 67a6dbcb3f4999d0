"""A real run that is resumed under another recipe: what applies, what is rejected, and what may be missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.train import main as ckpt_train
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from tests.support.runs import training


def resumed(recipe_file: Path, *overrides: str) -> Any:
    """The recipe, set up and closed again without a step."""
    recipe = training.build(recipe_file, *overrides)
    try:
        recipe.setup()
    finally:
        recipe.close()
    return recipe


NAMED = "  name: cosine\n  warmup_steps: 2\n"
STEP_LR = "  _target_: torch.optim.lr_scheduler.StepLR\n  step_size: 2\n"
GROUPS = "  lr: 1e-2\n  groups: [{params: ['*.embed_tokens.*'], lr: 1e-3}]\n"


@pytest.mark.parametrize("follows", [True, False], ids=["optimizer", "data and start"])
def test_a_resume_without_the_overrides_of_the_start_records_them_and_accepts_them_again(
    follows: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = training.RECIPE.replace("  lr: 1e-2\n", GROUPS).replace(NAMED, STEP_LR)
    text += "checkpoint: {save_consolidated: false}\n"
    run, recipe = tmp_path / "run", training.write_recipe(tmp_path, text)
    given = [f"init_from.path={tmp_path}/other", "seed=8", "dataloader.shuffle=false"]
    if follows:
        given = ["optimizer.lr=5e-3", "optimizer.weight_decay=0.5", "optimizer.betas=[0.8, 0.9]"]
        given += ["optimizer.groups.0.lr=1e-4", "lr_scheduler.gamma=0.25"]

    def start(*overrides: str, to: Path = run) -> int:
        common = [str(recipe), "--step_scheduler.ckpt_every_steps=2"]
        common.append(f"--checkpoint.checkpoint_dir={to}")
        return ckpt_train([*common, *(f"--{each}" for each in overrides)])

    if not follows:
        assert start("step_scheduler.max_steps=1", to=tmp_path / "other") == 0
    assert start(*given, "step_scheduler.max_steps=2") == 0
    capfd.readouterr()
    assert start("step_scheduler.max_steps=4") == 0
    log = capfd.readouterr().err
    assert log.count("not applied: the run keeps") == len(given)
    assert ("optimizer.on_resume: recipe applies the new value" in log) == follows
    first, second = (yaml_of(run / f"epoch_0_step_{step}") for step in (2, 4))
    assert second.replace("max_steps: 4", "max_steps: 2") == first
    assert ckpt(["diff", str(run / "epoch_0_step_2"), str(run / "epoch_0_step_4")]) == 0
    compared = capfd.readouterr().out
    assert not [each for each in given if each.partition("=")[0] in compared]
    assert start(*given, "step_scheduler.max_steps=5") == 0


def yaml_of(checkpoint: Path) -> str:
    return (checkpoint / "config.yaml").read_text()


def logged_rates(run: Path) -> list[float]:
    lines = map(json.loads, (run / "training.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if "lr" in line]


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The learning rates of the recipe's schedule, step by step, in a run without a resume."""
    directory = tmp_path_factory.mktemp("straight")
    options = f"--checkpoint.checkpoint_dir={directory / 'run'} --lr_scheduler.decay_steps=12"
    options += " --checkpoint.save_consolidated=false --step_scheduler.max_steps=6"
    training.train(training.write_recipe(directory), *options.split())
    return logged_rates(directory / "run")


def test_a_resume_applies_rejects_or_reports_what_its_recipe_changed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    rates: list[float],
) -> None:
    recipe = training.write_recipe(tmp_path)
    here: tuple[str, ...] = ("--checkpoint.checkpoint_dir", str(tmp_path / "run"))
    here += ("--lr_scheduler.decay_steps", "12", "--checkpoint.save_consolidated", "false")
    training.train(recipe, *here, "--step_scheduler.max_steps", "3")

    with pytest.raises(RecipeError) as rejected:
        resumed(recipe, *here, "--optimizer.lr", "0.5", "--seed", "8")
    assert "--optimizer.lr\n" in str(rejected.value) and "--seed\n" in str(rejected.value)
    assert ckpt_train(["--dry-run", str(recipe), *here, "--seed=8"]) == 2
    assert "--seed\n" in capsys.readouterr().err
    with pytest.raises(
        CheckpointUnusable, match=r"rms_norm_eps: 1e-06 in the checkpoint, 0\.01 here"
    ):
        resumed(recipe, *here, "--model.from_config.rms_norm_eps", "0.01")
    applied = resumed(recipe, *here, "--optimizer.lr", "0.5", "--optimizer.on_resume", "recipe")
    assert applied.optimizer.param_groups[0]["lr"] == pytest.approx(50 * rates[3])
    assert "optimizer.lr: 0.01 -> 0.5\n" in caplog.text + "\n"

    with pytest.raises(
        CheckpointUnusable, match=r"saved as F32 \[.*\], here BF16(.|\n)*model\.dtype"
    ):
        resumed(recipe, *here, "--model.dtype", "bfloat16")
    without = ("--lr_scheduler=null", "--checkpoint.allow_missing_state=[lr_scheduler]")
    constant = resumed(recipe, *here[:2], *without)
    assert constant.optimizer.param_groups[0]["lr"] == 1e-2

    without = (*here, "--checkpoint.save_optimizer", "false")
    training.train(recipe, *without, "--step_scheduler.max_steps", "4")
    training.train(recipe, *without, "--step_scheduler.max_steps", "6")
    assert (
        "save_optimizer is false: epoch_0_step_4 was saved without lr_scheduler, optimizer"
        in caplog.text
    )
    assert logged_rates(tmp_path / "run") == pytest.approx(rates)


def test_a_resume_with_another_class_of_optimizer_takes_its_options_or_starts_without_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rates: list[float]
) -> None:
    recipe = training.write_recipe(tmp_path)
    here = (f"--checkpoint.checkpoint_dir={tmp_path / 'run'}", "--lr_scheduler.decay_steps=12")
    training.train(recipe, *here, "--step_scheduler.max_steps", "3")

    sgd = (*here, "--optimizer", "{_target_: torch.optim.SGD, lr: 0.5, momentum: 0.9}")
    with pytest.raises(CheckpointUnusable) as other_class:
        resumed(recipe, *sgd)
    said = str(other_class.value)
    assert "+ optimizer.state.*.momentum_buffer: here, but not saved" in said
    assert "allow_missing_state '[optimizer]'" in said and len(said.splitlines()) < 20
    with pytest.raises(RecipeError, match=r"optimizer\.weight_decay: 0; epoch_0_step_3 was saved"):
        resumed(recipe, *here, "--optimizer", "{_target_: torch.optim.Adam, lr: 0.5}")
    # The state of AdamW fits Adam: only an option distinguishes them.
    adam = (*here, "--optimizer", "{_target_: torch.optim.Adam, lr: 0.01, weight_decay: 0.01}")
    with pytest.raises(RecipeError, match=r"decoupled_weight_decay: False; epoch_0_step_3 was"):
        resumed(recipe, *adam)
    changed = resumed(recipe, *adam, "--optimizer.on_resume", "recipe").optimizer
    assert changed.state and not changed.param_groups[0]["decoupled_weight_decay"]

    caplog.clear()
    anew = resumed(recipe, *sgd, "--checkpoint.allow_missing_state", "[optimizer]")
    assert not anew.optimizer.state and anew.step_scheduler.step == 3
    assert anew.optimizer.param_groups[0]["lr"] == pytest.approx(50 * rates[3])
    assert "optimizer starts without state" in caplog.text
    for name, weight in resumed(recipe, *here).model.state_dict().items():
        assert torch.equal(weight, anew.model.state_dict()[name])
