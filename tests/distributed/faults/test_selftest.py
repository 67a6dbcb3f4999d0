"""--selftest-resume: what resumes exactly is found to, what does not is named with step, quantity and both values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.cli.checks.selftest import Runs, plan_of, selftest
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.selftest_probe import observed
from tests.support.runs.training import Recipe, build, write_recipe
from tests.support.servers.command_server import CommandServer

MIXED = "--distributed.mixed_precision=bfloat16"


class Forgetful(Recipe):
    """Its random numbers and an odd weight are not restored."""

    def build(self) -> None:
        super().build()
        self.odd = torch.nn.Linear(1, 1)
        self.untracked |= {"rng"}


def run(
    directory: Path,
    capfd: pytest.CaptureFixture[str],
    *arguments: str,
    recipe_class: type[Recipe] = Recipe,
) -> tuple[int, str]:
    """(exit code, what was printed)"""
    line = parse(["--selftest-resume", "--selftest-steps", "4", *arguments])
    assert not line.problems

    def observe(loaded: Any, notes: Path, stop_after: int | None) -> Any:
        build(directory / "recipe.yaml", recipe_class=recipe_class)  # resolves the plug-ins
        return loaded, observed(recipe_class, notes, stop_after=stop_after)

    recipe = load_recipe(write_recipe(directory), line.overrides)
    code = selftest(recipe, line, observe)
    return code, capfd.readouterr().out


def test_a_mixed_run_with_dropout_and_workers_goes_on_exactly_and_each_step_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Files outside of the run directory are those of the user's runs, and a run without checkpoints cannot go back.
    report, traces = tmp_path / "speed.json", tmp_path / "traces"
    others = ["--step_scheduler.on_spike={}", f"--throughput.file={report}"]
    others += [f"--profile.directory={traces}", "--profile.num_steps=1", "--profile.start_step=2"]
    code, out = run(tmp_path, capfd, MIXED, "--dataloader.num_workers=1", *others)
    assert code == 0
    assert not report.exists() and not traces.exists()
    *steps, verdict = out.splitlines()
    assert verdict == "bit-identical: 4 steps, stopped after step 2, 1 rank"
    pattern = (
        r"step \d  samples 8  loss \S+  grad norm \S+  lr \S+  "
        r"dataloader \w{12}  .*model \w{12}  .*rng \w{12} .* same"
    )
    assert all(re.fullmatch(pattern, line) for line in steps), out
    assert len(set(steps)) == len(steps) == 4


def test_two_ranks_go_on_exactly(tmp_path: Path, commands: CommandServer) -> None:
    words = ["--selftest-resume", "--selftest-steps=4", MIXED, "--nproc-per-node=2", "--json"]
    done = commands.run(
        "ckpt-train", str(write_recipe(tmp_path)), *words, cwd=tmp_path, timeout=170
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"], found["num_ranks"], found["first_difference"]) == (
        0,
        "bit-identical",
        2,
        None,
    )


def test_state_that_is_not_restored_is_named_with_its_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out = run(tmp_path, capfd, recipe_class=Forgetful)
    assert code == 1
    assert "different: 4 steps" in out
    assert re.search(
        r"first difference: step 3, rank 0, loss: straight \d+\.\d+, resumed \d+\.\d+", out
    ), out


def test_a_run_that_fails_shows_what_it_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = parse(["--selftest-resume", "--model.freeze=['*']"])
    path = write_recipe(tmp_path)

    def observe(loaded: Any, notes: Path, stop_after: int | None) -> Any:
        build(path)
        return loaded, observed(Recipe, notes, stop_after=stop_after)

    assert selftest(load_recipe(path, line.overrides), line, observe) == 2
    err = capfd.readouterr().err
    assert "no parameter is left to train" in err
    assert "the run 'straight' ended with exit code 2" in err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--selftest-steps", "1"), "at least 2 steps"),
        (("--selftest-steps", "many"), "at least 2 steps"),
        (
            ("--step_scheduler.max_steps=1",),
            r"at least 2 steps[\s\S]*where: +step_scheduler.max_steps[\s\S]*--selftest-steps",
        ),
        (("--nnodes=2",), "starts its own ranks"),
    ],
)
def test_a_selftest_that_cannot_be_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], what: str
) -> None:
    line = parse(["--selftest-resume", *arguments])
    recipe = load_recipe(write_recipe(tmp_path), line.overrides)
    with pytest.raises(RecipeError, match=what):
        selftest(recipe, line, lambda *_: (None, Recipe))


@pytest.mark.parametrize(
    ("max_steps", "arguments", "expected"),
    [(None, (), 6), (60, (), 6), (3, (), 3), (1, ("--selftest-steps=4",), 4)],
)
def test_a_short_run_is_tested_with_its_own_number_of_steps(
    max_steps: int | None, arguments: tuple[str, ...], expected: int
) -> None:
    line = parse(["--selftest-resume", *arguments])
    assert plan_of(line, max_steps).num_steps == expected


def test_data_of_a_single_step_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = parse(["--selftest-resume"])
    monkeypatch.setattr(Runs, "_run", lambda *_: [[object()]])
    with pytest.raises(RecipeError, match="the data ended after 1 step"):
        selftest(load_recipe(write_recipe(tmp_path), line.overrides), line, lambda *_: None)  # type: ignore[arg-type, return-value]
