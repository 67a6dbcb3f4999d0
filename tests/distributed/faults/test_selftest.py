"""--selftest-resume: what resumes exactly is found to, what does not is named with step, quantity and both values."""

import json
import re
from pathlib import Path

import pytest

from tests.support.runs.training import RECIPE, write_recipe
from tests.support.servers.command_server import CommandServer

MIXED = "--distributed.mixed_precision=bfloat16"

FORGETFUL = '''
import torch
from automodel_ckpt.recipes.llm_finetune import LLMFinetune


class Forgetful(LLMFinetune):
    """Its random numbers and an odd weight are not restored."""

    def build(self):
        super().build()
        self.odd = torch.nn.Linear(1, 1)
        self.untracked |= {"rng"}
'''


@pytest.fixture
def run(tmp_path: Path, commands: CommandServer) -> "Run":
    return Run(tmp_path, commands)


class Run:
    def __init__(self, directory: Path, commands: CommandServer) -> None:
        self.directory, self.commands = directory, commands

    def __call__(self, *arguments: str, text: str = RECIPE) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        recipe = write_recipe(self.directory, text)
        words = [str(recipe), "--selftest-resume", *arguments]
        done = self.commands.run("ckpt-train", *words, cwd=self.directory, timeout=170)
        return done.returncode, done.stdout, done.stderr


def test_a_mixed_run_with_dropout_and_workers_goes_on_exactly_and_each_step_is_told(
    tmp_path: Path, run: Run
) -> None:
    # Files outside of the run directory are those of the user's runs, and a run without checkpoints cannot go back.
    traces = tmp_path / "traces"
    others = ["--step_scheduler.on_spike={}"]
    others += [f"--profile.directory={traces}", "--profile.num_steps=1", "--profile.start_step=2"]
    code, out, err = run("--selftest-steps=4", MIXED, "--dataloader.num_workers=1", *others)
    assert code == 0, err
    assert not traces.exists()
    *steps, verdict = out.splitlines()
    assert verdict == "bit-identical: 4 steps, stopped after step 2, 1 rank"
    pattern = r"step \d  samples 8  loss \S+  grad norm \S+  lr \S+"
    assert all(re.fullmatch(pattern, line) for line in steps), out
    assert len(set(steps)) == len(steps) == 4


@pytest.mark.further
def test_two_ranks_go_on_exactly(run: Run) -> None:
    code, out, err = run("--selftest-steps=4", MIXED, "--nproc-per-node=2", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["verdict"], found["num_ranks"]) == ("bit-identical", [2, 2])
    assert found["first_difference"] is None


@pytest.mark.further
@pytest.mark.parametrize(
    ("before", "after", "packs"), [(1, 2, ()), (2, 1, ("--packed_sequence.size=32",))]
)
def test_on_other_ranks_the_samples_are_the_same_and_the_losses_nearly(
    run: Run, before: int, after: int, packs: tuple[str, ...]
) -> None:
    still = ("--model.from_config.attention_dropout=0", "--step_scheduler.local_batch_size=1")
    ranks = (f"--nproc-per-node={before}", f"--selftest-nproc={after}", "--selftest-steps=4")
    code, out, err = run(*ranks, *still, *packs)
    assert code == 0, err
    assert "equal within tolerance: 4 steps, stopped after step 2" in out
    assert f", resumed on {after}" in out
    assert re.search(r"largest relative difference of loss: \S+ \(tolerance 0\.001\)", out)


def test_state_that_is_not_restored_is_named_with_its_step(tmp_path: Path, run: Run) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    text = f"recipe: forgetful.py:Forgetful\n{RECIPE}"
    # A short run is tested with its own number of steps.
    code, out, err = run("--step_scheduler.max_steps=3", "--trust", "forgetful.py", text=text)
    assert code == 1, err
    assert "different: 3 steps" in out
    pattern = r"first difference: step 2, rank 0, loss: straight \d+\.\d+, resumed \d+\.\d+"
    assert re.search(pattern, out), out


def test_a_run_that_fails_shows_what_it_said(run: Run) -> None:
    code, _, err = run("--model.freeze=['*']")
    assert code == 2
    assert "no parameter is left to train" in err
    assert "the run 'straight' ended with exit code 2" in err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--selftest-steps", "many"), "at least 2 steps"),
        (
            ("--step_scheduler.max_steps=1",),
            r"at least 2 steps[\s\S]*where: +step_scheduler.max_steps[\s\S]*--selftest-steps",
        ),
        (("--nnodes=2",), "starts its own ranks"),
        (("--selftest-steps=4", "--dataset.max_samples=8"), "the data ended after 1 step"),
    ],
)
def test_a_selftest_that_cannot_be_is_refused(
    run: Run, arguments: tuple[str, ...], what: str
) -> None:
    code, _, err = run("--step_scheduler.num_epochs=1", *arguments)
    assert code == 2
    assert re.search(what, err), err
