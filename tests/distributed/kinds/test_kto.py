"""The recipe ``kto``: the steps of TRL, measures without samples, and another reference."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fixtures.preference import tiny_policy
from tests.support.runs.preference import step_records, write_recorded
from tests.support.runs.training import train

RECORDED = json.loads((Path(tiny_policy.__file__).parent / "trl_kto.json").read_text())
RECIPE = """
recipe: kto
model: {from_pretrained: %(base)s}
dataset: {_target_: automodel_ckpt.data.kto.judged_completions, path: %(rows)s, seq_length: 32}
optimizer: {lr: %(learning_rate)s, weight_decay: %(weight_decay)s}
clip_grad_norm: %(max_grad_norm)s
dataloader: {shuffle: false}
step_scheduler: {global_batch_size: 4, local_batch_size: 2}
checkpoint: {checkpoint_dir: %(run)s}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe of TRL's runs, with its model and its rows."""
    return write_recorded(tmp_path, RECIPE, RECORDED, RECORDED["rows"])


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_ten_steps_are_those_of_trl(recipe: Path, name: str) -> None:
    run = RECORDED["runs"][name]
    given = run["options"]
    options = (
        f"--kto.beta={given['beta']}",
        f"--kto.desirable_weight={given['desirable_weight']}",
        f"--kto.undesirable_weight={given['undesirable_weight']}",
    )
    train(recipe, *options)
    steps = step_records(recipe.parent / "run")
    assert len(steps) == len(run["steps"]) == 10
    for mine, theirs in zip(steps, run["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["kl"] == pytest.approx(theirs["kl"], abs=1e-4, rel=2e-4)
        assert mine["reward_desirable"] == pytest.approx(
            theirs["rewards/chosen"], abs=1e-4, rel=2e-4
        )
        assert mine["reward_undesirable"] == pytest.approx(
            theirs["rewards/rejected"], abs=1e-4, rel=2e-4
        )
        assert mine["samples"] == 4
    assert max(step["kl"] for step in steps) > 1


def test_measures_without_samples_are_null(recipe: Path) -> None:
    data = f"_target_: automodel_ckpt.data.kto.judged_completions, path: {recipe.parent}/rows.jsonl"
    validated = f"--validation_datasets={{all: {{{data}, max_samples: 11}}, good: {{{data}, max_samples: 1}}}}"
    # The last global batch of the epoch has one sample, without another completion.
    train(recipe, "--step_scheduler.max_steps=2", "--dataset.max_samples=5", validated)
    second = step_records(recipe.parent / "run")[1]
    assert (second["samples"], second["kl"]) == (1, 0)
    assert (second["reward_desirable"] is None) != (second["reward_undesirable"] is None)
    validation = step_records(recipe.parent / "run", "validation")[-1]
    assert validation["samples"] == 11
    assert validation["val_kl"] > 0 and validation["val_kl_good"] == 0
    assert validation["val_reward_undesirable_good"] is None


def test_a_named_reference_is_another_model(recipe: Path) -> None:
    other = AutoModelForCausalLM.from_config(tiny_policy.config())
    torch.manual_seed(1)
    other.save_pretrained(recipe.parent / "other")
    options = (f"--kto.reference={recipe.parent / 'other'}", "--step_scheduler.max_steps=1")
    train(recipe, *options)
    [step] = step_records(recipe.parent / "run")
    assert step["loss"] != pytest.approx(0.5, abs=1e-3)
